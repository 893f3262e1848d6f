// SPDX-License-Identifier: Apache-2.0
//! Output of commands: aligned tables, colours, JSON.

use std::io::{IsTerminal, Write};

use crate::error::{Failure, Outcome};

/// Aligns rows into columns, each as wide as its widest cell, with two blanks between them.
pub fn align(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| {
        rows.iter()
            .filter_map(|r| r.get(c))
            .map(|t| t.chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(cell);
            line.extend(std::iter::repeat_n(' ', width + 2 - cell.chars().count()));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Colours of the terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Colour {
    /// Good.
    Green,
    /// Bad, or missing.
    Red,
    /// A heading.
    Bold,
}

/// Whether standard output gets colours: it is a terminal, and NO_COLOR is unset or empty (no-color.org).
pub fn coloured() -> bool {
    std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

/// The text with the escape sequences of a colour.
pub fn paint(text: &str, colour: Colour) -> String {
    let code = match colour {
        Colour::Green => 32,
        Colour::Red => 31,
        Colour::Bold => 1,
    };
    format!("\x1b[{code}m{text}\x1b[0m")
}

/// Writes to standard output. A reader that closes the pipe early (`viola vms | head -1`) is no failure.
///
/// # Errors
/// When standard output cannot be written for another reason.
pub fn print(text: &str) -> Outcome {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Failure::run(format!(
            "cannot write to standard output: {e}"
        ))),
        _ => Ok(()),
    }
}

/// Writes a line to standard error, after the program's name. A closed standard error is ignored.
pub fn note(program: &str, text: &str) {
    let _ = writeln!(std::io::stderr(), "{program}: {text}");
}

/// Writes a value as JSON to standard output.
///
/// # Errors
/// As [`print()`].
pub fn print_json(value: &impl serde::Serialize) -> Outcome {
    let json = serde_json::to_string_pretty(value).map_err(Failure::run)?;
    print(&format!("{json}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let row = |cells: &[&str]| cells.iter().map(|c| (*c).to_owned()).collect::<Vec<_>>();
        let text = align(&[
            row(&["NAME", "WAIT"]),
            row(&["datenbank-ä", "8 %"]),
            row(&["x"]),
        ]);
        assert_eq!(text, "NAME         WAIT\ndatenbank-ä  8 %\nx\n");
    }
}
