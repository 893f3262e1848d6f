// SPDX-License-Identifier: Apache-2.0
//! `viola top`: the VMs of this host on a terminal, now or from a recording.
//!
//! | module | does |
//! |---|---|
//! | `app` | the state, and what each key does to it |
//! | `draw` | the state on a screen |
//! | `live`, `replay` | sources of moments: a daemon, a recording |
//! | `terminal` | raw mode, keys, signals |

mod app;
mod draw;
mod live;
mod replay;
mod terminal;

use crate::args;
use viola_cli::error::{Failure, Outcome};

/// `viola top`
///
/// # Errors
/// Exit status 2 without a terminal or with a file that is not a recording.
pub fn run(args: &args::Top) -> Outcome {
    use std::io::IsTerminal;
    let looks = draw::Looks {
        colour: std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty()),
    };
    let is_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let instead = "top needs a terminal; `viola vms` prints the table once";
    match &args.replay {
        Some(file) => {
            let replay = replay::Replay::open(file).map_err(Failure::usage)?;
            match is_terminal {
                true => replay.run(looks),
                false => Err(Failure::usage(instead)),
            }
        }
        None if !is_terminal => Err(Failure::usage(instead)),
        None => live::run(&args.socket.path(), looks),
    }
}
