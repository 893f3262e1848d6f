// SPDX-License-Identifier: Apache-2.0
//! `GET /metrics`, for Prometheus. Every name is in docs/src/metrics.md.

use super::daemon_metrics;
use super::view::View;
use crate::prometheus::Text;
use crate::{lanes, slices, vms, vpipe, vread};

/// Content type of the answer.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4";

/// The answer: all metrics.
pub fn text(view: &View) -> String {
    let mut out = Text::default();
    daemon_metrics::write(&mut out, &view.status);
    vms::metrics::write(&mut out, &view.vms.vms, &view.totals, &view.packet_delays);
    slices::metrics::write(&mut out, &view.status.cores, &view.vms.vms);
    vread::metrics::write(&mut out, &view.vread);
    vpipe::metrics::write(&mut out, &view.vread.pipes);
    lanes::metrics::write(&mut out, &view.lanes);
    out.into_text()
}

/// Name and type of each metric.
#[cfg(any(test, feature = "testing"))]
pub fn names() -> Vec<(String, String)> {
    let text = text(&crate::testing::view(&["a"]));
    let lines = text.lines().filter_map(|l| l.strip_prefix("# TYPE "));
    let names: Vec<(String, String)> = lines
        .filter_map(|l| l.split_once(' '))
        .map(|(name, kind)| (name.to_owned(), kind.to_owned()))
        .collect();
    let mut once = names.clone();
    once.sort();
    once.dedup();
    assert_eq!(once.len(), names.len(), "a name has two types");
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_base_units_and_counters_end_with_total() {
        for (name, kind) in names() {
            assert_eq!(name.ends_with("_total"), kind == "counter", "{name}");
            for unit in ["millisec", "microsec", "_ms", "_ns", "kib", "percent"] {
                assert!(!name.contains(unit), "{name} is not in base units");
            }
        }
    }

    #[test]
    fn every_sample_has_a_metric_and_no_series_appears_twice() {
        let mut view = crate::testing::view(&["web", "web", "db\"1"]);
        view.vms.vms[1].id = "qemu:web".into();
        let text = text(&view);
        let mut seen = std::collections::BTreeSet::new();
        let known: Vec<String> = names().into_iter().map(|(name, _)| name).collect();
        for line in text.lines().filter(|l| !l.starts_with('#')) {
            let (series, value) = line.rsplit_once(' ').unwrap();
            let name = series.split('{').next().unwrap();
            let base = ["_bucket", "_sum", "_count"].map(|end| name.strip_suffix(end));
            let is_known = |name: &str| known.iter().any(|k| k == name);
            assert!(
                is_known(name) || base.into_iter().flatten().any(is_known),
                "{line}"
            );
            assert!(value.parse::<f64>().is_ok(), "{line}");
            assert!(seen.insert(series.to_owned()), "twice: {line}");
        }
        assert!(text.contains("{domain=\"qemu:web\"}"), "{text}");
        // 4 of 7 packets met a running vCPU, and 3 waited 17 ms.
        let delays = "viola_domain_packet_delay_seconds";
        for line in [
            "_bucket{domain=\"db\\\"1\",le=\"0.000016384\"} 4",
            "_bucket{domain=\"db\\\"1\",le=\"0.033554432\"} 7",
            "_bucket{domain=\"db\\\"1\",le=\"+Inf\"} 7",
            "_sum{domain=\"db\\\"1\"} 0.051",
            "_count{domain=\"db\\\"1\"} 7",
        ] {
            assert!(text.contains(&format!("\n{delays}{line}\n")), "{line}");
        }
    }
}
