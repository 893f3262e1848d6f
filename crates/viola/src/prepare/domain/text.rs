// SPDX-License-Identifier: Apache-2.0
//! Changes of XML as text: an element is added or cut out, and nothing else changes.

use std::fmt::Write as _;

use roxmltree::Node;

/// The text with more at the end of an element.
pub(super) fn insert_into(xml: &str, node: Node<'_, '_>, more: &str) -> String {
    let range = node.range();
    let element = &xml[range.clone()];
    let (head, tail) = (&xml[..range.start], &xml[range.end..]);
    let start = start_of_line(xml, range.start);
    let before = &xml[start..range.start];
    let blanks = if before.trim().is_empty() { before } else { "" };
    if let Some(open) = element.strip_suffix("/>") {
        let name = tag(element);
        return format!("{head}{open}>\n{more}{blanks}</{name}>{tail}");
    }
    let close = range.start + element.rfind("</").unwrap_or(element.len());
    let at = start_of_line(xml, close);
    let (at, before) = if xml[at..close].trim().is_empty() {
        (at, "")
    } else {
        (close, "\n")
    };
    format!("{}{before}{more}{}", &xml[..at], &xml[at..])
}

/// The name of an element with its prefix.
fn tag(element: &str) -> &str {
    let name = element.trim_start_matches('<');
    let end = name.find(|c: char| c.is_whitespace() || c == '/' || c == '>');
    &name[..end.unwrap_or(name.len())]
}

/// The text without an element and the line that it leaves empty.
pub(super) fn cut(xml: &str, node: Node<'_, '_>) -> String {
    let range = node.range();
    let start = start_of_line(xml, range.start);
    let end = xml[range.end..]
        .find('\n')
        .map_or(xml.len(), |n| range.end + n + 1);
    let is_alone =
        xml[start..range.start].trim().is_empty() && xml[range.end..end].trim().is_empty();
    let (start, end) = if is_alone {
        (start, end)
    } else {
        (range.start, range.end)
    };
    format!("{}{}", &xml[..start], &xml[end..])
}

pub(super) fn start_of_line(xml: &str, at: usize) -> usize {
    xml[..at].rfind('\n').map_or(0, |n| n + 1)
}

/// Each line with blanks before it, and a line break after it.
pub(super) fn indented(text: &str, blanks: usize) -> String {
    text.lines().fold(String::new(), |mut all, line| {
        // Writing to a string does not fail.
        let _ = writeln!(all, "{:blanks$}{line}", "");
        all
    })
}
