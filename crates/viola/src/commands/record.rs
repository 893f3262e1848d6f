// SPDX-License-Identifier: Apache-2.0
//! `viola record`

use std::time::{Duration, Instant};

use crate::args;
use crate::record::{self, News, Writer};
use viola_cli::client::Client;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;
use viola_cli::quantities::{duration, duration_in};

/// Intervals that can be asked for, ns.
const INTERVALS: std::ops::RangeInclusive<u64> = 100_000_000..=3_600_000_000_000;
/// How long a signal waits at most.
const NAP: Duration = Duration::from_millis(100);

/// Writes what the daemon shows until it is told to end. A daemon that is gone is waited for.
pub fn record(args: &args::Record) -> Outcome {
    let interval = duration_in(&args.interval, &INTERVALS)
        .map_err(|e| Failure::usage(format!("interval: {e}")))?;
    let span = match &args.length {
        None => None,
        Some(text) => Some(duration(text).map_err(|e| Failure::usage(format!("for: {e}")))?),
    };
    interrupt::watch()?;
    let failed = |e| Failure::run(format!("{}: {e}", args.file.display()));
    let client = Client::new(&args.socket.path());
    let mut writer = Writer::open(&args.file, &host()).map_err(failed)?;
    let mut news = News::default();
    let mut gone = None;
    let begun = Instant::now();
    let end = span.map(|ns| begun + Duration::from_nanos(ns));
    let mut next = begun;
    while !interrupt::asked() && end.is_none_or(|end| Instant::now() < end) {
        let now = Instant::now();
        if now < next {
            std::thread::sleep((next - now).min(NAP));
            continue;
        }
        next = (next + Duration::from_nanos(interval)).max(now);
        match record::ask(&client) {
            Ok((moment, events)) => {
                if gone.take().is_some() {
                    eprintln!("viola: the daemon is there again");
                }
                writer.moment(&moment, &news.of(events)).map_err(failed)?;
            }
            Err(e) => {
                let why = e.to_string();
                if gone.as_ref() != Some(&why) {
                    eprintln!("viola: {why}; going on trying");
                    writer.gap(&why).map_err(failed)?;
                    gone = Some(why);
                }
            }
        }
    }
    Ok(())
}

/// What this host calls itself.
pub fn host() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}
