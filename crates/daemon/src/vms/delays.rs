// SPDX-License-Identifier: Apache-2.0
//! Delays and residual waits of a VM as the control socket shows them.

use viola_meter::{Histogram, Waits};
use viola_proto::{Delay, ResidualWait};

/// The delays of events.
pub fn delay(delays: &Histogram) -> Delay {
    Delay {
        count: delays.count(),
        p50_ns: delays.quantile(0.5),
        p99_ns: delays.quantile(0.99),
        buckets: delays.buckets().collect(),
    }
}

/// The residual wait; `None` before the first measurement.
pub fn residual_wait(waits: &Waits) -> Option<ResidualWait> {
    Some(ResidualWait {
        mean_ns: waits.residual_mean()?,
        p50_ns: waits.residual_quantile(0.5)?,
        p99_ns: waits.residual_quantile(0.99)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_events_there_are_no_percentiles_and_without_time_no_residual_wait() {
        assert_eq!(delay(&Histogram::default()), Delay::default());
        assert_eq!(residual_wait(&Waits::default()), None);
    }

    #[test]
    fn a_long_delay_among_short_ones_is_the_p99_of_few_events() {
        let mut delays = Histogram::default();
        delays.add(0, 30);
        delays.add(20_000_000, 1);
        let shown = delay(&delays);
        assert_eq!((shown.count, shown.p50_ns), (31, Some(1280)));
        assert!((20_000_000..25_000_000).contains(&shown.p99_ns.unwrap()));
        assert_eq!(shown.buckets.len(), 2);
    }
}
