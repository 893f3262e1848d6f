// SPDX-License-Identifier: Apache-2.0
//! Prometheus' text format, version 0.0.4.

use std::fmt::Write;

/// Type of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Grows until a restart; its name ends with `_total`.
    Counter,
    /// The present value.
    Gauge,
    /// Counts of values up to some bounds, their sum and their number.
    Histogram,
}

/// Returns the value of a metric for an item.
pub type ValueOf<T> = fn(&T) -> f64;

/// A metric of a table: name, type, help, and a function from an item to its value.
pub type Metric<V> = (&'static str, Kind, &'static str, V);

/// Tables of metrics, one metric a line: type, name, help, value.
macro_rules! metrics {
    ($(const $table:ident: $value_type:ty = {
        $($kind:ident $name:literal $help:literal, $value:expr;)*
    })*) => {$(
        const $table: &[$crate::prometheus::Metric<$value_type>] = {
            const ROWS: [$crate::prometheus::Metric<$value_type>; [$($name),*].len()] =
                [$(($name, $crate::prometheus::Kind::$kind, $help, $value)),*];
            &ROWS
        };
    )*};
}
pub(crate) use metrics;

/// The body of an answer.
#[derive(Debug, Default)]
pub struct Text(String);

impl Text {
    /// Starts a metric; its samples follow.
    pub fn head(&mut self, name: &str, kind: Kind, help: &str) {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let _ = write!(self.0, "# HELP {name} {help}.\n# TYPE {name} {kind}\n");
    }

    /// Adds a sample.
    pub fn line(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        self.0.push_str(name);
        for (i, (key, text)) in labels.iter().enumerate() {
            let before = if i == 0 { '{' } else { ',' };
            let _ = write!(self.0, "{before}{key}=\"{}\"", escaped(text));
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _ = match value {
            v if v == f64::INFINITY => writeln!(self.0, " +Inf"),
            v if v == f64::NEG_INFINITY => writeln!(self.0, " -Inf"),
            v => writeln!(self.0, " {v}"),
        };
    }

    /// Adds the samples of a histogram. `below` are bounds, ascending, with the number of values up to each.
    pub fn histogram(
        &mut self,
        name: &str,
        labels: &[(&str, &str)],
        below: impl IntoIterator<Item = (f64, u64)>,
        sum: f64,
        count: u64,
    ) {
        let ends = [("+Inf".to_owned(), count)];
        let below = below.into_iter().map(|(le, n)| (le.to_string(), n));
        for (le, n) in below.chain(ends) {
            let labels = [labels, &[("le", &le)]].concat();
            self.line(&format!("{name}_bucket"), &labels, n as f64);
        }
        self.line(&format!("{name}_sum"), labels, sum);
        self.line(&format!("{name}_count"), labels, count as f64);
    }

    /// Adds the metrics of a table, with a sample for each item. `prefix` comes before each name; `label` is the label of an item.
    pub fn all<T>(
        &mut self,
        prefix: &str,
        metrics: &[Metric<ValueOf<T>>],
        items: &[T],
        label: impl Fn(&T) -> (&'static str, String),
    ) {
        for (name, kind, help, value) in metrics {
            let name = format!("{prefix}{name}");
            self.head(&name, *kind, help);
            for item in items {
                let (key, text) = label(item);
                self.line(&name, &[(key, &text)], value(item));
            }
        }
    }

    /// The body.
    pub fn into_text(self) -> String {
        self.0
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_a_name_labels_and_a_number() {
        let mut text = Text::default();
        text.head("a_total", Kind::Counter, "What it is");
        text.line("a_total", &[], 3.0);
        text.line("a_total", &[("vm", "x\"\\\n"), ("cpu", "1")], 0.25);
        text.line("a_total", &[], f64::INFINITY);
        assert_eq!(
            text.into_text(),
            "# HELP a_total What it is.\n# TYPE a_total counter\na_total 3\n\
             a_total{vm=\"x\\\"\\\\\\n\",cpu=\"1\"} 0.25\na_total +Inf\n"
        );
    }

    #[test]
    fn a_histogram_has_cumulative_buckets_a_sum_and_a_count() {
        let mut text = Text::default();
        text.head("d_seconds", Kind::Histogram, "Delays");
        let below = [(0.001, 2), (0.5, 3)];
        text.histogram("d_seconds", &[("vm", "a")], below, 1.25, 4);
        assert_eq!(
            text.into_text(),
            "# HELP d_seconds Delays.\n# TYPE d_seconds histogram\n\
             d_seconds_bucket{vm=\"a\",le=\"0.001\"} 2\n\
             d_seconds_bucket{vm=\"a\",le=\"0.5\"} 3\n\
             d_seconds_bucket{vm=\"a\",le=\"+Inf\"} 4\n\
             d_seconds_sum{vm=\"a\"} 1.25\nd_seconds_count{vm=\"a\"} 4\n"
        );
    }
}
