// SPDX-License-Identifier: Apache-2.0
//! What the control loop works on, and the steps that belong to no accelerator.
//!
//! | file | does |
//! |---|---|
//! | `observe` | reads facts about the host, and its VMs |
//! | `measure` | reads what VMs spent |
//! | `requests` | carries out what clients and signals ask for |
//! | `status` | builds the view that the control socket serves |

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use viola_host::Inventory;
use viola_host::facts::HostFacts;
use viola_meter::Meter;
use viola_proto::Decisions;

use crate::host::exits::ExitWatch;
use crate::host::launchers;
use crate::host::libvirt::{Launch, Libvirt};
use crate::host::registrations::RegistrationWatch;
use crate::lanes::Lanes;
use crate::lanes::advice::PacketLoads;
use crate::slices::Slices;
use crate::supervisor::Workers;
use crate::turbo::Turbo;
use crate::vms::Inputs;
use crate::vms::settings::Settings;
use crate::vms::totals::Totals;
use crate::vpipe::advice::FileSenders;
use crate::vread::advice::BlockReaders;
use viola_cli::error::{Failure, Outcome, chain};
use viola_cli::log::{self, Level};
use viola_config::{Config, VmScope};

mod measure;
mod observe;
mod requests;
mod status;

/// State of the control loop.
pub struct Control {
    pub(crate) inputs: Inputs,
    pub(crate) meter: Meter,
    pub(crate) slices: Slices,
    pub(crate) turbo: Turbo,
    /// VFs of SR-IOV NICs, on a thread of their own; `None` in a dry run.
    lanes: Option<Lanes>,
    /// Workers of vread and vpipe, on a thread of their own; `None` in a dry run.
    workers: Option<Workers>,
    /// Events of libvirt, unless the configuration switches them off.
    libvirt: Option<Libvirt>,
    /// VMs that send files, of which vpipe could do the sending.
    pub(crate) file_senders: FileSenders,
    /// The packets of each VM.
    pub(crate) packet_loads: PacketLoads,
    /// VMs that read HDFS blocks of other VMs of this host.
    pub(crate) block_readers: BlockReaders,
    exits: ExitWatch,
    registrations: RegistrationWatch,
    /// When a VM was last found.
    newest_vm: Option<Instant>,
    totals: Totals,
    /// What deciding has cost.
    pub(crate) decisions: Decisions,
    started: Instant,
    facts_read: Instant,
    next_scan: Instant,
    window_start: Instant,
    /// Lines that are logged once.
    logged: BTreeSet<String>,
    /// Warnings of the last scan.
    warnings: Vec<String>,
}

impl Control {
    /// Loads the accounting program and starts the threads. The first tick scans the host.
    ///
    /// # Errors
    /// When the mounts or the network namespace of this process cannot be read, or a thread cannot
    /// start.
    pub fn new(config: Config, facts: HostFacts, dry_run: bool) -> Outcome<Self> {
        let mut inventory = Inventory::new().map_err(|e| Failure::run(e.one_line()))?;
        inventory
            .restrict_to_own_netns(config.daemon.vms == VmScope::Own)
            .map_err(|e| Failure::run(e.one_line()))?;
        let (meter, accounting) = match Meter::exact() {
            Ok(meter) => (meter, Ok(())),
            Err(e) => (Meter::sampled(), Err(chain(&e))),
        };
        let (settings, warning) = Settings::read(&config.daemon.state_dir);
        let inputs = Inputs {
            online: facts.online(),
            config,
            settings,
            facts,
            inventory,
            dry_run,
            stopped: None,
        };
        let slices = Slices::new(&inputs, accounting);
        let (config, run_dir) = (&inputs.config, &inputs.config.daemon.run_dir);
        let workers = match dry_run {
            true => None,
            false => Some(Workers::start(run_dir)?),
        };
        if let Some(workers) = &workers {
            workers.configure(config);
        }
        let lanes = match dry_run {
            true => None,
            false => Some(Lanes::start(run_dir)?),
        };
        if let Some(lanes) = &lanes {
            lanes.set_overrides(inputs.settings.lanes());
            lanes.configure(config);
        }
        let libvirt = match config.daemon.libvirt {
            true => Some(Libvirt::start(Launch::default())?),
            false => None,
        };
        let now = Instant::now();
        let mut control = Self {
            inputs,
            meter,
            slices,
            turbo: Turbo::default(),
            lanes,
            workers,
            libvirt,
            file_senders: FileSenders::default(),
            packet_loads: PacketLoads::default(),
            block_readers: BlockReaders::default(),
            exits: ExitWatch::default(),
            registrations: RegistrationWatch::of(Path::new(
                viola_host::confirm::registrations::FOLDER,
            )),
            newest_vm: None,
            totals: Totals::default(),
            decisions: Decisions::default(),
            started: now,
            facts_read: now,
            next_scan: now,
            window_start: now,
            logged: BTreeSet::new(),
            warnings: Vec::new(),
        };
        if let Some(warning) = warning {
            control.log_once(Level::Warning, warning);
        }
        control.set_launchers();
        Ok(control)
    }

    /// Takes from the configuration who may confirm VMs.
    fn set_launchers(&mut self) {
        let (sources, left_out) = launchers::sources(&self.inputs.config);
        self.inputs.inventory.set_sources(sources);
        for line in left_out {
            self.log_once(Level::Warning, line);
        }
    }

    /// Time from one tick to the next.
    pub fn interval(&self) -> Duration {
        Duration::from_nanos(self.inputs.config.daemon.interval)
    }

    fn log_once(&mut self, level: Level, line: String) {
        if self.logged.insert(line.clone()) {
            log::line(level, line);
        }
    }
}

/// CPU time of the control loop so far. It measures what scans and decisions cost, because wall time would
/// make scans rarer on a loaded host.
pub(crate) fn thread_cpu_time() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec.unsigned_abs(), t.tv_nsec.unsigned_abs() as u32)
}
