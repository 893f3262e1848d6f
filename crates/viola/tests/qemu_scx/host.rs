// SPDX-License-Identifier: Apache-2.0
//! The emulated host.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use viola_lab::qemu::{Image, Program, QemuVm, VmSpec};
use viola_lab::testing::{core_of_counting_pc, lab_program};

/// Timeout of a script on a busy machine.
const SCRIPT_TIMEOUT: Duration = Duration::from_secs(600);

pub struct Host {
    machine: QemuVm,
    program: Program,
    _folder: tempfile::TempDir,
}

impl Host {
    /// Boots the host with the program and further programs at the same paths as here.
    pub fn boot(name: &str, further: &[PathBuf]) -> Self {
        Self::boot_with(name, 2, further)
    }

    /// The same with this number of CPUs.
    pub fn boot_with(name: &str, cpus: u32, further: &[PathBuf]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let image = Image::find_from([here], "new").unwrap_or_else(|e| panic!("{e}"));
        let viola = Path::new(env!("CARGO_BIN_EXE_viola"));
        let program = Program::pack_all(&[viola, &lab_program(viola)], further, folder.path())
            .unwrap_or_else(|e| panic!("{e}"));
        let spec = VmSpec::new(name).cpus(cpus).memory(768).icount(3);
        let spec = program.disk(spec.cores(&[core_of_counting_pc()]));
        let begin = Instant::now();
        let machine = QemuVm::start(&spec, &image, folder.path()).unwrap_or_else(|e| panic!("{e}"));
        program.unpack(&machine).unwrap();
        println!("booted in {:.0} s", begin.elapsed().as_secs_f32());
        Self {
            machine,
            program,
            _folder: folder,
        }
    }

    /// Runs a script in which `viola` is the program.
    pub fn sh(&self, script: &str) -> String {
        let script = format!("viola() {{ {} \"$@\"; }}; {script}", self.program.command());
        let output = self.machine.exec(&script, SCRIPT_TIMEOUT).unwrap();
        assert!(!output.timed_out, "{script}: {output:?}");
        format!("{}{}", output.stdout, output.stderr)
    }

    pub fn stand(&self, words: &str) -> String {
        self.sh(&format!("/viola/bin/viola-lab internal stand {words}"))
    }

    /// Share of each VM (percent of the core) and response times of the first one (p50, p99, us).
    pub fn run(&self, mechanism: &str, seconds: u32, vms: &str) -> Reading {
        self.run_on("1", mechanism, seconds, vms)
    }

    /// The same with core 2 as the regular and core 1 as the turbo core. CPU 1 receives an interrupt from CPU 0 at once; the
    /// others receive it only when QEMU emulates them.
    pub fn run_turbo(&self, mechanism: &str, seconds: u32, vms: &str) -> Reading {
        self.run_on("2,1", mechanism, seconds, vms)
    }

    fn run_on(&self, cpus: &str, mechanism: &str, seconds: u32, vms: &str) -> Reading {
        let text = self.stand(&format!("run {mechanism} {cpus} {seconds} {vms}"));
        let value: Value = serde_json::from_str(text.lines().last().unwrap_or_default())
            .unwrap_or_else(|e| panic!("{e}: {text}"));
        println!("{vms}\n  {value}");
        assert_eq!(value["ended"], serde_json::json!([]), "{}", self.messages());
        let list = |name: &str| -> Vec<f64> {
            let list = value[name].as_array().unwrap();
            list.iter().map(|s| s.as_f64().unwrap()).collect()
        };
        let cores = value["cost"]["cores"].as_array().unwrap();
        let decisions = |core: &Value| core["decisions"].as_u64().unwrap();
        Reading {
            shares: list("shares_percent"),
            turbo: list("first_threads_percent"),
            decisions: cores.iter().map(decisions).collect(),
            answers: value["answers"].as_u64().unwrap(),
            p50_us: value["answer_p50_us"].as_f64().unwrap_or(f64::NAN),
            p99_us: value["answer_p99_us"].as_f64().unwrap_or(f64::NAN),
        }
    }

    pub fn state(&self) -> String {
        self.sh("cat /sys/kernel/sched_ext/state").trim().to_owned()
    }

    pub fn messages(&self) -> String {
        self.sh("dmesg | grep -i sched_ext | tail -n 5")
    }
}

#[derive(Debug)]
pub struct Reading {
    pub shares: Vec<f64>,
    /// Share of the first thread of each VM, which is the turbo vCPU if there is one.
    pub turbo: Vec<f64>,
    /// Decisions of the scheduler, by core.
    pub decisions: Vec<u64>,
    /// Number of answers of the first VM.
    pub answers: u64,
    pub p50_us: f64,
    pub p99_us: f64,
}

impl Reading {
    /// Asserts that every VM has its share of the core, within 1.5 points.
    pub fn assert_shares(&self, wanted: &[f64]) {
        assert_eq!(self.shares.len(), wanted.len());
        for (got, wanted) in self.shares.iter().zip(wanted) {
            assert!((got - wanted).abs() <= 1.5, "{self:?}, wanted {wanted}");
        }
    }
}
