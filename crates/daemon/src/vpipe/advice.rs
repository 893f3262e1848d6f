// SPDX-License-Identifier: Apache-2.0
//! Which VMs without `[vm.pipe]` send files that the host could send in their place.

use viola_host::{Vm, VmId};
use viola_meter::Snapshot;
use viola_policy::pipes::{FileSender, FileThresholds, FileWindow};
use viola_policy::slices::Nanos;
use viola_proto::VmReport;

use crate::vms::report::propose;
use crate::vms::signs::{Sign, Signs, Sum};
use viola_cli::quantities::{byte_rate, percent};
use viola_config::Config;

/// Whether a VM sends files, and what its last window showed.
#[derive(Debug)]
struct State {
    sender: FileSender,
    last: FileWindow,
}

/// What each VM reads and sends.
#[derive(Debug, Default)]
pub struct FileSenders(Signs<State>);

impl FileSenders {
    /// Takes what each VM did in a window. Returns a line for the log for each VM that has begun to send files and may have a pipe.
    pub fn observe(
        &mut self,
        window: &Snapshot,
        vms: &[Vm],
        config: &Config,
    ) -> Vec<(VmId, String)> {
        let may_have = |id: &VmId| {
            let mut named = vms.iter().filter(|vm| vm.id == *id);
            named.any(|vm| may_have_pipe(vm, config))
        };
        let began = self.0.observe(window);
        let named = began.into_iter().filter(|sample| may_have(&sample.id));
        named
            .filter_map(|sample| {
                let state = self.0.get(&sample.id)?;
                Some((sample.id.clone(), format!("vpipe could help: it {state}")))
            })
            .collect()
    }

    /// Advises VMs that send files and have no `[vm.pipe]` to get one.
    pub fn add_advice(&self, reports: &mut [VmReport], vms: &[Vm], config: &Config) {
        for (report, vm) in reports.iter_mut().zip(vms) {
            let state = self.0.get(&vm.id);
            let Some(state) = state.filter(|_| may_have_pipe(vm, config)) else {
                continue;
            };
            let sentence = format!(
                "{}: it {state}; files of 2 MiB and more that go out by plain HTTP could be sent by the host: the book's \
                 page on vpipe tells what [vm.pipe] needs",
                report.name
            );
            propose(report, "vpipe", sentence);
        }
    }

    /// Forgets a VM that is gone.
    pub fn forget(&mut self, id: &VmId) {
        self.0.forget(id);
    }
}

/// Whether a VM has no `[vm.pipe]` and could be given one. Nothing can be granted under a name that is not confirmed.
fn may_have_pipe(vm: &Vm, config: &Config) -> bool {
    let settings = config.vm(vm.id.as_str(), &vm.name);
    vm.confirmed.is_some() && settings.is_none_or(|vm| vm.pipe.is_none())
}

impl Default for State {
    fn default() -> Self {
        Self {
            sender: FileSender::new(FileThresholds::default()),
            last: FileWindow::default(),
        }
    }
}

impl Sign for State {
    fn observe(&mut self, at: Nanos, window: &Sum) -> bool {
        let (traffic, total) = (&window.total.traffic, window.total.vcpu_total());
        self.last = FileWindow {
            read: window.per_s(traffic.disk_read),
            sent: window.per_s(traffic.tx_bytes),
            wanted: window.cores(total.run + total.wait),
        };
        self.sender.observe(at, &self.last)
    }

    fn is_there(&self) -> bool {
        self.sender.sends()
    }
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "reads {} from its disks and sends {}, and wants {} of a core",
            byte_rate(self.last.read),
            byte_rate(self.last.sent),
            percent(self.last.wanted)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{view, vm};
    use std::path::Path;
    use viola_meter::{Times, Traffic, VmSample};

    /// Number of lines for the log in the seconds of a VM that reads and sends so many MB/s.
    fn run(
        senders: &mut FileSenders,
        vm: &Vm,
        config: &str,
        seconds: u64,
        (read, sent): (u64, u64),
    ) -> usize {
        let config = Config::parse(Path::new("v.toml"), config).unwrap();
        let said = (0..seconds * 10).flat_map(|tick| {
            let with_disks = tick % 10 == 9;
            let window = Snapshot {
                at: tick * 100_000_000,
                span: 100_000_000,
                with_disks,
                vms: vec![VmSample {
                    id: vm.id.clone(),
                    vcpus: vec![Times {
                        run: 30_000_000,
                        wait: 20_000_000,
                        ..Times::default()
                    }],
                    service: Times::default(),
                    traffic: Traffic {
                        disk_read: if with_disks { read * 1_000_000 } else { 0 },
                        tx_bytes: sent * 100_000,
                        ..Traffic::default()
                    },
                }],
            };
            senders.observe(&window, std::slice::from_ref(vm), &config)
        });
        said.count()
    }

    fn advice(senders: &FileSenders, vm: &Vm, config: &str) -> (String, String) {
        let config = Config::parse(Path::new("v.toml"), config).unwrap();
        let mut reports = view(&["web"]).vms.vms;
        senders.add_advice(&mut reports, std::slice::from_ref(vm), &config);
        let report = reports.remove(0);
        (report.help.join(","), report.advice.unwrap_or_default())
    }

    #[test]
    fn a_vm_that_sends_files_is_named_once_and_advised_until_it_has_a_pipe() {
        let mut senders = FileSenders::default();
        let web = vm("web", 7, &[&[1]]);
        assert_eq!(run(&mut senders, &web, "", 9, (40, 42)), 0);
        assert_eq!(run(&mut senders, &web, "", 60, (40, 42)), 1);
        let (help, why) = advice(&senders, &web, "");
        assert_eq!(help, "vpipe");
        assert!(
            why.starts_with(
                "web: it reads 40 MB/s from its disks and sends 42 MB/s, and wants 50 % of a core;"
            ),
            "{why}"
        );
        senders.forget(&web.id);
        assert_eq!(advice(&senders, &web, "").0, "");
    }

    #[test]
    fn neither_a_vm_with_a_pipe_nor_one_of_an_unproven_name_is_named() {
        let web = vm("web", 7, &[&[1]]);
        let mut stranger = web.clone();
        stranger.confirmed = None;
        let pipe = "[[vm]]\nname = \"web\"\n[vm.pipe]";
        for (vm, config) in [(&web, pipe), (&stranger, "")] {
            let mut senders = FileSenders::default();
            assert_eq!(run(&mut senders, vm, config, 60, (40, 42)), 0);
            assert_eq!(advice(&senders, vm, config).0, "");
        }
    }

    #[test]
    fn a_vm_that_is_gone_is_forgotten() {
        let mut senders = FileSenders::default();
        let web = vm("web", 7, &[&[1]]);
        run(&mut senders, &web, "", 60, (40, 42));
        assert_eq!(advice(&senders, &web, "").0, "vpipe");
        senders.forget(&web.id);
        assert_eq!(advice(&senders, &web, "").0, "");
    }

    #[test]
    fn a_vm_that_answers_from_memory_is_not_advised() {
        let mut senders = FileSenders::default();
        let web = vm("web", 7, &[&[1]]);
        assert_eq!(run(&mut senders, &web, "", 60, (1, 80)), 0);
        assert_eq!(advice(&senders, &web, "").0, "");
    }
}
