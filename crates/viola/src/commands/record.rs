// SPDX-License-Identifier: Apache-2.0
//! `viola record`

use std::time::{Duration, Instant};

use crate::PROGRAM;
use crate::args;
use crate::record::{self, UnseenEvents, Writer};
use viola_cli::client::Client;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;
use viola_cli::quantities::{duration, duration_in};
use viola_cli::table::note;

/// Allowed intervals, ns.
const INTERVAL: std::ops::RangeInclusive<u64> = 100_000_000..=3_600_000_000_000;

/// Records until a signal or the end of `--for`; retries while the daemon does not answer.
pub fn record(args: &args::Record) -> Outcome {
    let interval = duration_in(&args.interval, &INTERVAL)
        .map_err(|e| Failure::usage(format!("interval: {e}")))?;
    let span = match &args.length {
        None => None,
        Some(text) => Some(duration(text).map_err(|e| Failure::usage(format!("for: {e}")))?),
    };
    interrupt::watch()?;
    let failed = |e| Failure::run(format!("{}: {e}", args.file.display()));
    let client = Client::new(&args.socket.path());
    let mut writer = Writer::open(&args.file, &host()).map_err(failed)?;
    let mut unseen = UnseenEvents::default();
    let mut failure = None;
    let begun = Instant::now();
    let end = span.map(|ns| begun + Duration::from_nanos(ns));
    let mut next = begun;
    while !interrupt::asked() && end.is_none_or(|end| Instant::now() < end) {
        let now = Instant::now();
        if now < next {
            interrupt::sleep(end.map_or(next, |end| next.min(end)) - now);
            continue;
        }
        next = (next + Duration::from_nanos(interval)).max(now);
        match record::request(&client) {
            Ok((moment, events)) => {
                if failure.take().is_some() {
                    note(PROGRAM, "the daemon answers again");
                }
                writer.moment(&moment, &unseen.of(events)).map_err(failed)?;
            }
            Err(e) => {
                let why = e.to_string();
                if failure.as_ref() != Some(&why) {
                    note(PROGRAM, &format!("{why}; retrying"));
                    writer.gap(&why).map_err(failed)?;
                    failure = Some(why);
                }
            }
        }
    }
    Ok(())
}

/// Host name of this machine.
pub fn host() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}
