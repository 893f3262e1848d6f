// SPDX-License-Identifier: Apache-2.0
//! The emulated host.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use viola_lab::qemu::{Image, Program, QemuVm, VmSpec};
use viola_lab::testing::lab_program;

/// How long a script may take on a busy machine.
const SCRIPT_TIMEOUT: Duration = Duration::from_secs(600);

pub struct Host {
    machine: QemuVm,
    program: Program,
    _folder: tempfile::TempDir,
}

impl Host {
    /// Boots it with the program, and further ones at the paths that they have here.
    pub fn boot(name: &str, further: &[PathBuf]) -> Self {
        Self::boot_with(name, 2, further)
    }

    /// The same with so many CPUs.
    pub fn boot_with(name: &str, cpus: u32, further: &[PathBuf]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let image = Image::find_from([here], "new").unwrap_or_else(|e| panic!("{e}"));
        let viola = Path::new(env!("CARGO_BIN_EXE_viola"));
        let program = Program::pack_all(&[viola, &lab_program(viola)], further, folder.path())
            .unwrap_or_else(|e| panic!("{e}"));
        let spec = program.disk(VmSpec::new(name).cpus(cpus).memory(768).icount(3));
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

    /// A script in which `viola` is the program.
    pub fn sh(&self, script: &str) -> String {
        let script = format!("viola() {{ {} \"$@\"; }}; {script}", self.program.command());
        let output = self.machine.exec(&script, SCRIPT_TIMEOUT).unwrap();
        assert!(!output.timed_out, "{script}: {output:?}");
        format!("{}{}", output.stdout, output.stderr)
    }

    pub fn stand(&self, words: &str) -> String {
        self.sh(&format!("/viola/bin/viola-lab internal stand {words}"))
    }

    /// What each VM got (percent of the core), and how long the first one took to answer (p50, p99, us).
    pub fn run(&self, mechanism: &str, seconds: u32, vms: &str) -> Reading {
        self.run_on("1", mechanism, seconds, vms)
    }

    /// The same with core 2, and core 1 as turbo core: of an interrupt that CPU 0 sends, CPU 1 hears at once, the others when it
    /// is their turn to be emulated.
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
    /// What the first thread of each got; of a VM with a turbo vCPU that one.
    pub turbo: Vec<f64>,
    /// Decisions of the scheduler, by core.
    pub decisions: Vec<u64>,
    /// How often the first one answered.
    pub answers: u64,
    pub p50_us: f64,
    pub p99_us: f64,
}

impl Reading {
    /// Every VM has its share of the core, within a point and a half.
    pub fn assert_shares(&self, wanted: &[f64]) {
        assert_eq!(self.shares.len(), wanted.len());
        for (got, wanted) in self.shares.iter().zip(wanted) {
            assert!((got - wanted).abs() <= 1.5, "{self:?}, wanted {wanted}");
        }
    }
}
