// SPDX-License-Identifier: Apache-2.0
//! A small SVG writer for the report. Shapes carry CSS classes; the page's style sheet gives the colours, so one file
//! serves light and dark display.

use std::fmt::Write;

use super::html::escape;

/// Alignment of text to its point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anchor {
    /// The text is centred on the point.
    Middle,
    /// The text ends at the point.
    End,
}

/// A picture. Its coordinates are SVG user units with y downwards; the page scales it to its width.
#[derive(Debug, Clone)]
pub struct Svg {
    width: f64,
    height: f64,
    title: String,
    description: String,
    body: String,
}

impl Svg {
    /// Creates an empty picture. Screen readers read the title and the description.
    pub fn new(width: f64, height: f64, title: &str, description: &str) -> Self {
        Self {
            width,
            height,
            title: title.to_owned(),
            description: description.to_owned(),
            body: String::new(),
        }
    }

    /// A line between two points.
    pub fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        let [x1, y1, x2, y2] = [from.0, from.1, to.0, to.1].map(number);
        let class = escape(class);
        self.put(&format!(
            "<line class=\"{class}\" x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\"/>"
        ));
    }

    /// A rectangle. Browsers show `title` as a tooltip.
    pub fn rect(&mut self, class: &str, at: (f64, f64), size: (f64, f64), title: Option<&str>) {
        let [x, y, w, h] = [at.0, at.1, size.0.max(0.0), size.1.max(0.0)].map(number);
        let class = escape(class);
        let shape =
            format!("<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{w}\" height=\"{h}\"");
        self.put(&match title {
            Some(title) => format!("{shape}><title>{}</title></rect>", escape(title)),
            None => format!("{shape}/>"),
        });
    }

    /// A polyline through the points.
    pub fn curve(&mut self, class: &str, points: impl IntoIterator<Item = (f64, f64)>) {
        let mut path = String::new();
        for (x, y) in points {
            let letter = if path.is_empty() { 'M' } else { 'L' };
            let _ = write!(path, "{letter}{} {}", number(x), number(y));
        }
        self.path(class, &path);
    }

    /// Many rectangles of one height in one path: `(x, width)` each.
    pub fn strip(
        &mut self,
        class: &str,
        y: f64,
        height: f64,
        spans: impl IntoIterator<Item = (f64, f64)>,
    ) {
        let mut path = String::new();
        let (y, height) = (number(y), number(height));
        for (x, width) in spans {
            let width = number(width);
            let _ = write!(path, "M{} {y}h{width}v{height}h-{width}z", number(x));
        }
        self.path(class, &path);
    }

    fn path(&mut self, class: &str, path: &str) {
        if !path.is_empty() {
            self.put(&format!("<path class=\"{}\" d=\"{path}\"/>", escape(class)));
        }
    }

    /// Text at a point of its baseline.
    pub fn text(&mut self, class: &str, at: (f64, f64), anchor: Anchor, text: &str) {
        let anchor = match anchor {
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        self.put(&format!(
            "<text class=\"{}\" x=\"{}\" y=\"{}\" text-anchor=\"{anchor}\">{}</text>",
            escape(class),
            number(at.0),
            number(at.1),
            escape(text)
        ));
    }

    fn put(&mut self, element: &str) {
        self.body.push_str(element);
        self.body.push('\n');
    }

    /// Returns the SVG element. `id` must be unique in the page.
    pub fn finish(&self, id: &str) -> String {
        let [w, h] = [self.width, self.height].map(number);
        let id = escape(id);
        format!(
            "<svg viewBox=\"0 0 {w} {h}\" role=\"img\" aria-labelledby=\"{id}-t {id}-d\">\n\
             <title id=\"{id}-t\">{}</title><desc id=\"{id}-d\">{}</desc>\n{}</svg>\n",
            escape(&self.title),
            escape(&self.description),
            self.body
        )
    }
}

/// Formats a coordinate with at most two decimals, as short as possible.
fn number(x: f64) -> String {
    let text = format!("{x:.2}");
    match text.trim_end_matches('0').trim_end_matches('.') {
        "" | "-0" => "0".into(),
        short => short.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_are_short() {
        assert_eq!(number(12.0), "12");
        assert_eq!(number(0.125), "0.12");
        assert_eq!(number(-0.001), "0");
        assert_eq!(number(100.5), "100.5");
    }

    #[test]
    fn a_picture_tells_a_screen_reader_what_it_is() {
        let svg = Svg::new(10.0, 5.0, "Waits", "A < B").finish("w");
        assert!(
            svg.starts_with("<svg viewBox=\"0 0 10 5\" role=\"img\" aria-labelledby=\"w-t w-d\">")
        );
        assert!(svg.contains("<desc id=\"w-d\">A &lt; B</desc>"));
        assert!(svg.trim_end().ends_with("</svg>"));
    }

    #[test]
    fn shapes_have_classes_and_no_colours() {
        let mut svg = Svg::new(10.0, 10.0, "", "");
        svg.line("grid", (0.0, 0.0), (10.0, 0.0));
        svg.rect("vm0", (1.0, 1.0), (2.0, -3.0), Some("web \"x\""));
        svg.curve("s0", [(0.0, 1.0), (2.0, 3.0)]);
        svg.strip("vm1", 2.0, 3.0, [(0.0, 1.5), (4.0, 1.0)]);
        svg.text("label", (1.0, 2.0), Anchor::End, "<b>");
        let text = svg.finish("x");
        for part in [
            r#"<line class="grid" x1="0" y1="0" x2="10" y2="0"/>"#,
            r#"<rect class="vm0" x="1" y="1" width="2" height="0"><title>web &quot;x&quot;</title></rect>"#,
            r#"<path class="s0" d="M0 1L2 3"/>"#,
            r#"<path class="vm1" d="M0 2h1.5v3h-1.5zM4 2h1v3h-1z"/>"#,
            r#"<text class="label" x="1" y="2" text-anchor="end">&lt;b&gt;</text>"#,
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        assert!(!text.contains("fill=") && !text.contains("style="));
    }

    #[test]
    fn an_empty_curve_draws_nothing() {
        let mut svg = Svg::new(1.0, 1.0, "", "");
        svg.curve("s0", []);
        svg.strip("vm0", 0.0, 1.0, []);
        assert!(!svg.finish("x").contains("path"));
    }
}
