// SPDX-License-Identifier: Apache-2.0
//! A table, as aligned text for the terminal and as HTML for the report.

use super::html::escape;

/// A row: a group heading, or cells.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Row {
    Group(String),
    Cells(Vec<String>),
}

/// A table: column headings and rows. The first column is text, the others are numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    head: Vec<String>,
    rows: Vec<Row>,
}

impl Table {
    /// Creates a table with these headings and no rows.
    pub fn new<T: Into<String>>(head: impl IntoIterator<Item = T>) -> Self {
        Self {
            head: head.into_iter().map(Into::into).collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a heading across all columns.
    pub fn group(&mut self, name: &str) {
        self.rows.push(Row::Group(name.to_owned()));
    }

    /// Adds a row. A row with fewer cells than headings ends early.
    pub fn row<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.rows
            .push(Row::Cells(cells.into_iter().map(Into::into).collect()));
    }

    /// Renders aligned text: first column left, others right, two spaces between columns.
    pub fn text(&self) -> String {
        let cells = || {
            std::iter::once(&self.head).chain(self.rows.iter().filter_map(|row| match row {
                Row::Cells(cells) => Some(cells),
                Row::Group(_) => None,
            }))
        };
        let columns = cells().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            cells()
                .filter_map(|r| r.get(column))
                .map(|c: &String| c.chars().count())
                .max()
        };
        let widths: Vec<usize> = (0..columns).map(|c| width(c).unwrap_or(0)).collect();
        let line = |cells: &[String]| {
            let mut line = String::new();
            for (column, (cell, width)) in cells.iter().zip(&widths).enumerate() {
                let gap = " ".repeat(width - cell.chars().count());
                match column {
                    0 => line = format!("{cell}{gap}"),
                    _ => line.push_str(&format!("  {gap}{cell}")),
                }
            }
            format!("{}\n", line.trim_end())
        };
        let mut text = line(&self.head);
        for row in &self.rows {
            match row {
                Row::Group(name) => text.push_str(&format!("\n{name}\n")),
                Row::Cells(cells) => text.push_str(&line(cells)),
            }
        }
        text
    }

    /// Renders an HTML table with a caption.
    pub fn html(&self, caption: &str) -> String {
        let mut html = format!("<table><caption>{}</caption>\n<thead><tr>", escape(caption));
        for name in &self.head {
            html.push_str(&format!("<th scope=\"col\">{}</th>", escape(name)));
        }
        html.push_str("</tr></thead>\n<tbody>\n");
        for row in &self.rows {
            html.push_str("<tr>");
            match row {
                Row::Group(name) => html.push_str(&format!(
                    "<th scope=\"rowgroup\" class=\"group\" colspan=\"{}\">{}</th>",
                    self.head.len(),
                    escape(name)
                )),
                Row::Cells(cells) => {
                    for (column, cell) in cells.iter().enumerate() {
                        html.push_str(&match column {
                            0 => format!("<th scope=\"row\">{}</th>", escape(cell)),
                            _ => format!("<td>{}</td>", escape(cell)),
                        });
                    }
                }
            }
            html.push_str("</tr>\n");
        }
        html.push_str("</tbody></table>\n");
        html
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Table {
        let mut table = Table::new(["", "stock", "viola"]);
        table.group("web busy");
        table.row(["ping p50 (ms)", "4.72", "0.530"]);
        table.row(["ping µs <x>", "16.5"]);
        table
    }

    #[test]
    fn numbers_stand_at_the_right_of_their_column() {
        assert_eq!(
            sample().text(),
            "               stock  viola\n\nweb busy\nping p50 (ms)   4.72  0.530\nping µs <x>     16.5\n"
        );
    }

    #[test]
    fn in_html_text_stays_text() {
        let html = sample().html("a & b");
        assert!(html.contains("<caption>a &amp; b</caption>"), "{html}");
        assert!(
            html.contains("<th scope=\"row\">ping µs &lt;x&gt;</th><td>16.5</td>"),
            "{html}"
        );
        assert!(html.contains("colspan=\"3\">web busy<"), "{html}");
    }
}
