// SPDX-License-Identifier: Apache-2.0
//! The Intel MPI Benchmarks on MPICH, one rank per guest, over TCP (dissertation 000, section 2.5.2, figures 2.15 and
//! 2.16).
//!
//! `scripts/mpi.sh` builds a folder with both; the guests mount it. MPICH's own mpiexec runs on the host, on the
//! guests' bridge. Its *manual* launcher starts nothing by itself: it prints the command of each host's proxy, and the
//! benchmark runs that command over the guest's command channel. So the guests need no login server. Ranks end with
//! their proxy, proxies with mpiexec, and mpiexec with the benchmark.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::channel;

use viola_lab::wire::Output;
use viola_lab::{Guest, Lab, Paths};

use super::mpiexec::{Event, Mpiexec, RUN_TIMEOUT, last_line, timeout_failure};
use super::plan::CALLS;
use crate::harness::guests::shell;
use crate::harness::side::lab_failure;
use crate::harness::tool::{first_line, folder_program};
use viola_cli::error::{Failure, Outcome};

/// Mount point of the folder in the guests.
const MOUNT: &str = "/run/mpi";
/// Prefix of the files in the guests that list a call's message sizes; the call's name follows.
const LENGTHS_PREFIX: &str = "/run/mpi-";
/// Libraries, relative to the folder.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const MPIEXEC: &str = "usr/bin/mpiexec.hydra";
/// The benchmark's own time limit per call and size, seconds. It is high enough to have no effect, because the
/// benchmark's adaptive repetition does not account for scheduling.
const IMB_TIME_LIMIT_S: &str = "60";
/// Environment of all ranks. UCX, MPICH's transport, uses only TCP over the guest's one NIC and logs only errors.
const ENVIRONMENT: [(&str, &str); 5] = [
    ("UCX_TLS", "tcp,self"),
    ("UCX_NET_DEVICES", "vec0"),
    ("UCX_LOG_LEVEL", "error"),
    // Disable the memory hooks that other transports need, and status files.
    ("UCX_MEM_EVENTS", "n"),
    ("UCX_VFS_ENABLE", "n"),
];

/// MPICH and the benchmarks, mounted in the guests of a lab.
pub struct Mpi {
    root: PathBuf,
    image: PathBuf,
}

/// The folder that `VIOLA_MPI` names, otherwise `mpi` beside the folder of the lab's images; `None` if it is
/// incomplete.
fn folder(image: &Path) -> Option<PathBuf> {
    folder_of(std::env::var_os("VIOLA_MPI").map(PathBuf::from), image)
}

fn folder_of(named: Option<PathBuf>, image: &Path) -> Option<PathBuf> {
    // Images are in build/lab/images/HASH, MPI in build/mpi.
    let beside = || Some(image.ancestors().nth(3)?.join("mpi"));
    let root = named.or_else(beside)?.join("root").canonicalize().ok()?;
    root.join("usr/bin/IMB-MPI1").is_file().then_some(root)
}

/// The error of a run without MPI.
pub fn missing() -> Failure {
    Failure::run("cannot find MPICH and the MPI benchmarks; run scripts/mpi.sh")
}

/// Whether MPICH and the benchmarks are installed.
///
/// # Errors
/// The guest image is missing.
pub fn is_there() -> Outcome<bool> {
    let paths = Paths::find().map_err(lab_failure)?;
    Ok(folder(&paths.image).is_some())
}

impl Mpi {
    /// Mounts the folder in the ranks' guests. `wide` runs in the same guests.
    ///
    /// # Errors
    /// The folder is missing, or a guest cannot mount it.
    pub fn mount(ranks: &[Guest], wide: &str) -> Outcome<Self> {
        let image = Paths::find().map_err(lab_failure)?.image;
        let root = folder(&image).ok_or_else(missing)?;
        let mut script = format!(
            "set -e; mkdir -p {MOUNT}; mount -t hostfs -o ro,{} none {MOUNT}; {wide}",
            root.display()
        );
        for (call, sizes) in CALLS {
            let lengths: String = sizes.iter().map(|size| format!("{size}\\n")).collect();
            script.push_str(&format!("; printf '{lengths}' >{LENGTHS_PREFIX}{call}"));
        }
        for guest in ranks {
            shell(guest, &script)?;
        }
        Ok(Self { root, image })
    }

    /// Mean time of each call over the ranks, in the order of [`CALLS`], in ms. Each call runs
    /// as often untimed as timed, plus once.
    ///
    /// # Errors
    /// A rank does not start, fails or times out; the error quotes its output.
    pub fn measure(&self, lab: &Lab, ranks: &[Guest], times: u32) -> Outcome<Vec<Option<f64>>> {
        let mut figures = Vec::new();
        for (call, sizes) in CALLS {
            let text = self.run(lab, ranks, call, times)?;
            let means = means(&text);
            for &size in sizes {
                let found = means.iter().find(|m| m.call == call && m.bytes == size);
                let none = || {
                    Failure::run(format!(
                        "IMB-MPI1 reported no time for {call} with {size} bytes; its last line: {}",
                        last_line(&text)
                    ))
                };
                figures.push(Some(found.ok_or_else(none)?.us / 1e3));
            }
        }
        Ok(figures)
    }

    /// Output of the first rank.
    fn run(&self, lab: &Lab, ranks: &[Guest], call: &str, times: u32) -> Outcome<String> {
        let mut mpiexec = Mpiexec::start(
            &mut self.mpiexec(lab, ranks, call, times)?,
            Some(lab.netns()),
        )?;
        let proxies = mpiexec.proxies(ranks.len())?;
        let (sender, events) = channel();
        mpiexec.listen(sender.clone());
        std::thread::scope(|scope| {
            for (guest, arguments) in ranks.iter().zip(proxies) {
                let sender = sender.clone();
                scope.spawn(move || {
                    let _ = sender.send(Event::Proxy(proxy(guest, arguments)));
                });
            }
            // Ending mpiexec ends the proxies; this scope waits for them.
            let text = mpiexec.text(&events, ranks.len());
            mpiexec.end();
            text
        })
    }

    fn mpiexec(&self, lab: &Lab, ranks: &[Guest], call: &str, times: u32) -> Outcome<Command> {
        let none = || Failure::run("the guests have no network bridge");
        let bridge = lab.spec().bridges.first().ok_or_else(none)?.address;
        let addresses: Option<Vec<String>> = ranks
            .iter()
            .map(|guest| guest.address().map(|a| a.to_string()))
            .collect();
        let hosts = addresses.ok_or_else(none)?.join(",");
        let mut command = folder_program(&self.image, &self.root, LIBRARIES, MPIEXEC);
        let count = ranks.len().to_string();
        command
            .args(["-launcher", "manual", "-localhost", &bridge.to_string()])
            .args(["-hosts", &hosts, "-ppn", "1", "-n", &count])
            .args(["-wdir", "/", "-genvnone"])
            .args(["-genv", "LD_LIBRARY_PATH", &format!("{MOUNT}/{LIBRARIES}")]);
        for (name, value) in ENVIRONMENT {
            command.args(["-genv", name, value]);
        }
        command
            .arg(format!("{MOUNT}/usr/bin/IMB-MPI1"))
            .args([
                "-npmin",
                &count,
                "-msglen",
                &format!("{LENGTHS_PREFIX}{call}"),
            ])
            .args(["-iter", &times.to_string(), "-iter_policy", "off"])
            .args(["-time", IMB_TIME_LIMIT_S])
            .arg(call)
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .current_dir("/");
        Ok(command)
    }
}

/// Runs a proxy in its guest until it ends.
fn proxy(guest: &Guest, arguments: Vec<String>) -> Outcome {
    let mut argv = vec![
        "env".to_owned(),
        format!("LD_LIBRARY_PATH={MOUNT}/{LIBRARIES}"),
        format!("{MOUNT}/usr/bin/hydra_pmi_proxy"),
    ];
    argv.extend(arguments);
    let output = guest
        .exec_for(&argv, "", RUN_TIMEOUT)
        .map_err(lab_failure)?;
    match output {
        Output { status: 0, .. } => Ok(()),
        Output {
            timed_out: true, ..
        } => Err(timeout_failure()),
        output => Err(Failure::run(format!(
            "in guest {}: MPI's proxy ended with status {}: {}",
            guest.name(),
            output.status,
            first_line(&output.stderr)
        ))),
    }
}

/// A line of the benchmark's tables.
#[derive(Debug, PartialEq)]
struct TableRow<'a> {
    call: &'a str,
    bytes: u32,
    /// Mean time of the call over all ranks, µs.
    us: f64,
}

/// Parses the tables of IMB-MPI1: "# Benchmarking CALL", then a heading that begins with "#bytes" and names the
/// columns, then lines of numbers.
fn means(text: &str) -> Vec<TableRow<'_>> {
    let (mut call, mut column, mut found) = ("", None, Vec::new());
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["#", "Benchmarking", name, ..] => (call, column) = (name, None),
            ["#bytes", ..] => column = words.iter().position(|word| *word == "t_avg[usec]"),
            [bytes, ..] => {
                let us = column.and_then(|at| words.get(at)?.parse().ok());
                if let (Ok(bytes), Some(us)) = (bytes.parse(), us) {
                    found.push(TableRow { call, bytes, us });
                }
            }
            [] => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_read_from_the_benchmarks_tables() {
        let text = "
#----------------------------------------------------------------
# Benchmarking Alltoall 
# #processes = 4 
#----------------------------------------------------------------
       #bytes #repetitions  t_min[usec]  t_max[usec]  t_avg[usec]
            0          100         0.10         0.20         0.15
         1024          100      2042.95      2113.05      2081.07

#-----------------------------------------------------------------------------
# Benchmarking Sendrecv 
# #processes = 4 
#-----------------------------------------------------------------------------
       #bytes #repetitions  t_min[usec]  t_max[usec]  t_avg[usec]   Mbytes/sec
         1024          100       936.80       938.37       937.62         2.18
      1048576           40     18305.01     18420.10     18377.50       113.85


# All processes entering MPI_Finalize
";
        let of = |call, bytes, us| TableRow { call, bytes, us };
        assert_eq!(
            means(text),
            [
                of("Alltoall", 0, 0.15),
                of("Alltoall", 1024, 2081.07),
                of("Sendrecv", 1024, 937.62),
                of("Sendrecv", 1_048_576, 18377.5)
            ]
        );
    }

    #[test]
    fn numbers_outside_a_table_are_ignored() {
        let text =
            "# Benchmarking Sendrecv\n 1024 100 1.0 2.0 3.0 4.0\n# List of Benchmarks\n# 2\n";
        assert_eq!(means(text), []);
        assert_eq!(means("#bytes #repetitions t_avg[usec]\n1024 100\n"), []);
    }

    #[test]
    fn the_folder_is_beside_the_images_and_must_be_complete() {
        let top = tempfile::tempdir().unwrap();
        let image = top.path().join("build/lab/images/h");
        std::fs::create_dir_all(top.path().join("build/mpi/root/usr/bin")).unwrap();
        assert_eq!(folder_of(None, &image), None);
        let program = top.path().join("build/mpi/root/usr/bin/IMB-MPI1");
        std::fs::write(program, "").unwrap();
        let root = top.path().join("build/mpi/root").canonicalize().unwrap();
        assert_eq!(folder_of(None, &image), Some(root.clone()));
        let named = Some(top.path().join("build/mpi"));
        assert_eq!(folder_of(named, "/x".as_ref()), Some(root));
        assert_eq!(folder_of(Some("/nowhere".into()), &image), None);
    }
}
