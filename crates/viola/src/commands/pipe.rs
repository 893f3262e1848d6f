// SPDX-License-Identifier: Apache-2.0
//! `viola pipe`

use viola_proto::pipe::status::{Pipes, Transfer, TransferKind};

use super::vread::{row, size};
use crate::args;
use viola_cli::client::Client;
use viola_cli::error::Outcome;
use viola_cli::table::{align, print, print_json};

/// Shows the transfers that the host carries out for VMs.
pub fn pipe(what: &args::Pipe) -> Outcome {
    let args::Pipe::Ls(args) = what;
    let pipes: Pipes = Client::new(&args.socket.path()).get("/pipes")?;
    if args.json {
        return print_json(&pipes);
    }
    print(&list(&pipes))
}

fn list(pipes: &Pipes) -> String {
    if pipes.vms.is_empty() {
        return "no VM has [vm.pipe] in the configuration\n".into();
    }
    let mut vms = vec![row(&[
        "VM", "SERVED", "NOW", "BEGUN", "RETURNED", "RESET", "REFUSED", "MOVED", "CPU", "WHY",
    ])];
    let mut transfers = vec![row(&[
        "VM", "KIND", "LENGTH", "MOVED", "RATE", "AGE", "PEER",
    ])];
    for vm in &pipes.vms {
        let work = &vm.work;
        vms.push(vec![
            vm.name.clone(),
            match vm.serving {
                true if work.paused => "paused",
                true => "yes",
                false => "no",
            }
            .into(),
            work.transfers.len().to_string(),
            work.begun.to_string(),
            work.returned.to_string(),
            work.broken.to_string(),
            work.refused.to_string(),
            size(work.bytes),
            format!("{:.1} s", work.cpu_ms as f64 / 1000.0),
            vm.why.clone(),
        ]);
        transfers.extend(work.transfers.iter().map(|t| transfer(&vm.name, t)));
    }
    let mut text = align(&vms);
    if transfers.len() > 1 {
        text.push_str(&align(&transfers));
    }
    text
}

fn transfer(vm: &str, t: &Transfer) -> Vec<String> {
    let seconds = t.age_ms as f64 / 1000.0;
    let rate = match t.age_ms {
        0 => "-".into(),
        _ => format!("{}/s", size((t.sent as f64 / seconds) as u64)),
    };
    vec![
        vm.to_owned(),
        match t.kind {
            TransferKind::Send => "send",
            TransferKind::Receive => "receive",
            TransferKind::Relay => "relay",
            TransferKind::Copy => "copy",
        }
        .into(),
        size(t.length),
        size(t.sent),
        rate,
        format!("{seconds:.1} s"),
        t.peer.map_or("-".into(), |peer| peer.to_string()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_proto::pipe::status::{PipeStats, PipeVm};

    #[test]
    fn transfers_are_listed_with_their_rate() {
        assert!(list(&Pipes::default()).contains("no VM"));
        let pipes = Pipes {
            vms: vec![PipeVm {
                name: "web".into(),
                serving: true,
                work: PipeStats {
                    transfers: vec![Transfer {
                        kind: TransferKind::Send,
                        local: "10.0.0.2:80".parse().ok(),
                        peer: "10.0.0.9:4660".parse().ok(),
                        length: 2 << 20,
                        sent: 1 << 20,
                        age_ms: 500,
                    }],
                    ..PipeStats::default()
                },
                ..PipeVm::default()
            }],
        };
        let text = list(&pipes);
        assert!(
            text.contains("2.0 MiB") && text.contains("2.0 MiB/s"),
            "{text}"
        );
        assert!(text.contains("10.0.0.9:4660"), "{text}");
    }
}
