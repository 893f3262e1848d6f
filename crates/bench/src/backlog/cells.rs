// SPDX-License-Identifier: Apache-2.0
//! Cells of the benchmark: the receiver's load, and the programs that compete for its vCPU.

use std::time::Duration;

const STREAM_TIME: Duration = Duration::from_millis(2500);
/// Duration of a load over the long line, where a stream starts slowly.
const LONG_LINE_TIME: Duration = Duration::from_secs(8);
/// Time to set up and tear down a cell.
const SETUP_TIME: Duration = Duration::from_secs(6);

/// Load that is sent to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// A stream at full rate; bytes per recv().
    Bulk(usize),
    /// One request after another, each of this many bytes; the reply is one byte.
    Requests(usize),
}

/// Conditions around the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    pub name: &'static str,
    /// vCPU of the receiver. vCPU 0 serves interrupts.
    pub vcpu: u32,
    /// Whether a program in the guest spins on the receiver's vCPU.
    pub spinner: bool,
    /// Whether threads spin on the host core of vCPU 1.
    pub neighbours: bool,
    pub load: Load,
    /// netem settings for packets to the receiver; empty without a long line.
    pub line: &'static str,
}

impl Cell {
    /// Duration of the load.
    pub fn load_time(&self) -> Duration {
        match self.line {
            "" => STREAM_TIME,
            _ => LONG_LINE_TIME,
        }
    }

    /// Duration of the cell, including setup and teardown.
    pub fn total_time(&self) -> Duration {
        self.load_time() + SETUP_TIME
    }
}

const KIB: usize = 1 << 10;

/// One vCPU for interrupts and receiver, beside a spinning program.
const fn shared_vcpu(name: &'static str, read: usize) -> Cell {
    Cell {
        name,
        vcpu: 0,
        spinner: true,
        neighbours: false,
        load: Load::Bulk(read),
        line: "",
    }
}

/// Interrupts on a turbo vCPU; the receiver has its core for itself.
const fn turbo(name: &'static str, load: Load) -> Cell {
    Cell {
        name,
        vcpu: 1,
        spinner: false,
        neighbours: false,
        load,
        line: "",
    }
}

/// The same with neighbours on the receiver's core.
const fn shared(name: &'static str, load: Load) -> Cell {
    Cell {
        neighbours: true,
        ..turbo(name, load)
    }
}

/// The same over a long line.
const fn far(name: &'static str, line: &'static str) -> Cell {
    Cell {
        line,
        ..shared(name, Load::Bulk(256 * KIB))
    }
}

/// All cells.
pub const CELLS: [Cell; 12] = [
    shared_vcpu("one vCPU for all, a spinner, 4 KiB reads", 4 * KIB),
    shared_vcpu("one vCPU for all, a spinner, 256 KiB reads", 256 * KIB),
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
