// SPDX-License-Identifier: Apache-2.0
//! What is measured: who receives, what, and who else wants its vCPU.

use std::time::Duration;

const STREAM: Duration = Duration::from_millis(2500);
/// Over a longer way windows take their time.
const FAR_STREAM: Duration = Duration::from_secs(8);
/// What stands around a stream.
const AROUND: Duration = Duration::from_secs(6);

/// What is sent to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// As much as goes; bytes of one recv().
    Bulk(usize),
    /// One request after another, each of so many bytes; the answer is a byte.
    Requests(usize),
}

/// Who else wants the receiver's vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    pub name: &'static str,
    /// The vCPU of the receiver; interrupts are served by vCPU 0.
    pub vcpu: u32,
    /// A program in the guest that never rests, beside the receiver.
    pub spinner: bool,
    /// Threads on the core of this machine that vCPU 1 has.
    pub neighbours: bool,
    pub load: Load,
    /// What netem does to packets on their way to the receiver; empty: there is no way.
    pub way: &'static str,
}

impl Cell {
    /// How long it is loaded.
    pub fn length(&self) -> Duration {
        match self.way {
            "" => STREAM,
            _ => FAR_STREAM,
        }
    }

    /// With what stands around it.
    pub fn whole(&self) -> Duration {
        self.length() + AROUND
    }
}

const KIB: usize = 1 << 10;

/// One vCPU for interrupts and receiver, beside a program that never rests.
const fn one(name: &'static str, read: usize) -> Cell {
    Cell {
        name,
        vcpu: 0,
        spinner: true,
        neighbours: false,
        load: Load::Bulk(read),
        way: "",
    }
}

/// Interrupts on a turbo vCPU, the receiver on one that has the core for itself.
const fn turbo(name: &'static str, load: Load) -> Cell {
    Cell {
        name,
        vcpu: 1,
        spinner: false,
        neighbours: false,
        load,
        way: "",
    }
}

/// The same where others want the core, too.
const fn shared(name: &'static str, load: Load) -> Cell {
    Cell {
        neighbours: true,
        ..turbo(name, load)
    }
}

/// The same over a longer way.
const fn far(name: &'static str, way: &'static str) -> Cell {
    Cell {
        way,
        ..shared(name, Load::Bulk(256 * KIB))
    }
}

/// All of them.
pub const CELLS: [Cell; 12] = [
    one("one vCPU for all, a spinner, 4 KiB reads", 4 * KIB),
    one("one vCPU for all, a spinner, 256 KiB reads", 256 * KIB),
    turbo("turbo, alone, 256 KiB reads", Load::Bulk(256 * KIB)),
    Cell {
        spinner: true,
        ..turbo("turbo, a spinner, 256 KiB reads", Load::Bulk(256 * KIB))
    },
    shared("turbo, neighbours, 4 KiB reads", Load::Bulk(4 * KIB)),
    shared("turbo, neighbours, 256 KiB reads", Load::Bulk(256 * KIB)),
    Cell {
        spinner: true,
        ..shared(
            "turbo, neighbours and a spinner, 256 KiB reads",
            Load::Bulk(256 * KIB),
        )
    },
    shared("turbo, neighbours, one byte to and fro", Load::Requests(1)),
    shared(
        "turbo, neighbours, requests of 64 KiB",
        Load::Requests(64 * KIB),
    ),
    far("turbo, neighbours, 20 ms away", "delay 20ms"),
    far(
        "turbo, neighbours, 20 ms away, 0.1 % lost",
        "delay 20ms loss 0.1%",
    ),
    far(
        "turbo, neighbours, 40 ms away, 1 % lost",
        "delay 40ms loss 1%",
    ),
];
