// SPDX-License-Identifier: Apache-2.0
//! Metrics of VMs whose files the host sends.

use viola_proto::pipe::status::{PipeVm, Pipes};

use crate::prometheus::{Text, metrics};

metrics! {
    const PIPES: fn(&PipeVm) -> f64 = {
        Gauge "open" "Transfers that the host makes now", |s| s.work.transfers.len() as f64;
        Counter "begun_total" "Transfers begun", |s| s.work.begun as f64;
        Counter "refused_total" "Transfers left to the VM", |s| s.work.refused as f64;
        Counter "returned_total" "Transfers whose connections went back whole", |s| s.work.returned as f64;
        Counter "broken_total" "Transfers that ended in a reset or an error", |s| s.work.broken as f64;
        Counter "other_congestion_total" "Connections sent with another congestion control than the VM's", |s| s.work.other_congestion as f64;
        Counter "bytes_total" "Bytes moved in the VM's place", |s| s.work.bytes as f64;
        Counter "cpu_seconds_total" "CPU time of the host spent for it", |s| s.work.cpu_ms as f64 / 1e3;
    }
}

/// Writes what vpipe did.
pub fn write(out: &mut Text, pipes: &Pipes) {
    out.all("viola_pipe_", PIPES, &pipes.vms, |s| ("vm", s.name.clone()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_proto::pipe::status::PipeStats;

    #[test]
    fn each_sender_has_a_sample() {
        let pipes = Pipes {
            vms: vec![PipeVm {
                name: "web".into(),
                work: PipeStats {
                    bytes: 7,
                    cpu_ms: 1500,
                    ..PipeStats::default()
                },
                ..PipeVm::default()
            }],
        };
        let mut out = Text::default();
        write(&mut out, &pipes);
        let text = out.into_text();
        for line in [
            "viola_pipe_bytes_total{vm=\"web\"} 7\n",
            "viola_pipe_cpu_seconds_total{vm=\"web\"} 1.5\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
    }
}
