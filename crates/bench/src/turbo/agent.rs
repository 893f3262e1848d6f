// SPDX-License-Identifier: Apache-2.0
//! Setups with viola-agent, or only its receive buffers, in a guest with a turbo vCPU.

use viola_lab::Guest;

use crate::harness::guests::shell;
use viola_cli::error::Outcome;

/// Agent configuration: buffers for 1 Gbit/s over 16 ms, times four. 16 ms is the longest wait of the guest's programs
/// among four guests with slices of 4 ms.
const CONFIG: &str = "[turbo]\\ncpu = 0\\nbandwidth_mbit = 1000\\ndelay_ms = 16\\nheadroom = 4\\ndefault_buffers = true\\n";
/// The resulting receive buffer, bytes.
const BUFFER_BYTES: u32 = 8_000_000;

/// Starts the agent and waits until its settings are active.
///
/// # Errors
/// They are not active after 300 looks, which take three minutes or, in an emulated guest, more; the error quotes the agent.
pub fn start(guest: &Guest) -> Outcome {
    let script = format!(
        "cd /run; printf '{CONFIG}' >bench-agent.toml
        viola-agent --config /run/bench-agent.toml </dev/null >/run/bench-agent.log 2>&1 & echo $! >/run/bench-agent.pid
        for i in $(seq 300); do
          viola-agent --config /run/bench-agent.toml status >/run/bench-agent.status 2>&1
          grep -q 'in force' /run/bench-agent.status && exit 0
          usleep 500000
        done
        cat /run/bench-agent.log /run/bench-agent.status >&2; exit 1"
    );
    shell(guest, &script).map(drop)
}

/// Ends the agent, which restores everything.
///
/// # Errors
/// The agent does not end.
pub fn stop(guest: &Guest) -> Outcome {
    let script = "p=$(cat /run/bench-agent.pid); kill $p; for i in $(seq 200); do [ -e /proc/$p/exe ] || exit 0; usleep 100000; done
        echo 'viola-agent does not end' >&2; exit 1";
    shell(guest, script).map(drop)
}

/// Sets the agent's receive buffers in the guest.
///
/// # Errors
/// The guest refuses the setting.
pub fn buffers(guest: &Guest) -> Outcome {
    let script = format!(
        "cd /proc/sys/net; cat core/rmem_default core/rmem_max ipv4/tcp_rmem >/run/bench-buffers
        echo {BUFFER_BYTES} >core/rmem_max; echo {BUFFER_BYTES} >core/rmem_default; echo 4096 {BUFFER_BYTES} {BUFFER_BYTES} >ipv4/tcp_rmem"
    );
    shell(guest, &script).map(drop)
}

/// Restores the default buffers.
///
/// # Errors
/// The guest refuses the setting.
pub fn no_buffers(guest: &Guest) -> Outcome {
    let script = "cd /proc/sys/net; { read a; read b; read c; } </run/bench-buffers
        echo $a >core/rmem_default; echo $b >core/rmem_max; echo $c >ipv4/tcp_rmem";
    shell(guest, script).map(drop)
}
