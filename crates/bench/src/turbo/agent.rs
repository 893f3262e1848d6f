// SPDX-License-Identifier: Apache-2.0
//! What viola-agent does in a guest with a turbo vCPU: the agent itself, or the receive buffers alone.

use viola_lab::Guest;

use crate::harness::guests::shell;
use viola_cli::error::Outcome;

/// 1 Gbit/s for 16 ms, which the guest's programs wait at most with slices of 4 ms among four, four times.
const CONFIG: &str = "[turbo]\\ncpu = 0\\nbandwidth_mbit = 1000\\ndelay_ms = 16\\nheadroom = 4\\ndefault_buffers = true\\n";
/// The size that this comes to.
const BUFFER: u32 = 8_000_000;

/// Starts it, and waits until all is in force.
///
/// # Errors
/// It is not within a minute: with what the agent says.
pub fn start(guest: &Guest) -> Outcome {
    let script = format!(
        "cd /run; printf '{CONFIG}' >bench-agent.toml
        viola-agent --config /run/bench-agent.toml </dev/null >/run/bench-agent.log 2>&1 & echo $! >/run/bench-agent.pid
        for i in $(seq 200); do
          viola-agent --config /run/bench-agent.toml status 2>/dev/null | grep -q 'in force' && exit 0
          usleep 250000
        done
        cat /run/bench-agent.log >&2; exit 1"
    );
    shell(guest, &script).map(drop)
}

/// Ends it, after it has put everything back.
///
/// # Errors
/// It does not end.
pub fn stop(guest: &Guest) -> Outcome {
    let script = "p=$(cat /run/bench-agent.pid); kill $p; for i in $(seq 200); do [ -e /proc/$p/exe ] || exit 0; usleep 100000; done
        echo 'viola-agent does not end' >&2; exit 1";
    shell(guest, script).map(drop)
}

/// Gives the guest the agent's buffers.
///
/// # Errors
/// The guest refuses.
pub fn buffers(guest: &Guest) -> Outcome {
    let script = format!(
        "cd /proc/sys/net; cat core/rmem_default core/rmem_max ipv4/tcp_rmem >/run/bench-buffers
        echo {BUFFER} >core/rmem_max; echo {BUFFER} >core/rmem_default; echo 4096 {BUFFER} {BUFFER} >ipv4/tcp_rmem"
    );
    shell(guest, &script).map(drop)
}

/// Takes them back.
///
/// # Errors
/// The guest refuses.
pub fn no_buffers(guest: &Guest) -> Outcome {
    let script = "cd /proc/sys/net; { read a; read b; read c; } </run/bench-buffers
        echo $a >core/rmem_default; echo $b >core/rmem_max; echo $c >ipv4/tcp_rmem";
    shell(guest, script).map(drop)
}
