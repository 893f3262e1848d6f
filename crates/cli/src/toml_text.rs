// SPDX-License-Identifier: Apache-2.0
//! Errors of TOML files as operators read them: the line, then the key, then what is wrong.

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Number of the line that holds byte `at`, from 1.
pub fn line_of(text: &str, at: usize) -> usize {
    1 + text.bytes().take(at).filter(|&b| b == b'\n').count()
}

/// Number of the line of a value, from 1. The path has keys and positions in lists, such as
/// `vm.2.cap`. Where the text lacks a part of the path, the line is that of the part before it.
pub fn line_of_value(text: &str, path: &str) -> usize {
    let Ok(table) = DeTable::parse(text) else {
        return 1;
    };
    let (mut place, mut at) = (DeValue::Table(table.into_inner()), 0);
    for part in path.split('.') {
        let found = match &place {
            DeValue::Array(all) => part.parse().ok().and_then(|i: usize| all.get(i)),
            other => other.get(part),
        };
        let Some(found) = found.cloned() else {
            break;
        };
        at = found.span().start;
        place = found.into_inner();
    }
    line_of(text, at)
}

/// Makes one line of the parser's message about byte `at`, after the key whose value is there.
pub fn explain(message: &str, text: &str, at: usize) -> String {
    let message = message.trim().replace('\n', ", ").replace('`', "");
    for (parser, ours) in [
        ("unknown field ", "unknown key "),
        ("missing field ", "missing key "),
    ] {
        if let Some(rest) = message.strip_prefix(parser) {
            return format!("{ours}{rest}")
                .replace(", expected one of ", "; allowed are ")
                .replace(", expected ", "; allowed is ");
        }
    }
    let message = match message.strip_prefix("unknown variant ") {
        Some(rest) => rest
            .replacen(", expected one of ", " is not allowed; write one of ", 1)
            .replacen(", expected ", " is not allowed; write ", 1),
        None => message,
    };
    let table = DeTable::parse(text).ok();
    match table.as_ref().and_then(|t| key_at(t.get_ref(), at)) {
        Some(key) => format!("{key}: {message}"),
        None => message,
    }
}

/// The key whose value has byte `at`. A value that is a table, or a list of tables, belongs to no key.
fn key_at<'a>(table: &'a DeTable<'_>, at: usize) -> Option<&'a str> {
    table.iter().find_map(|(key, value)| match value.get_ref() {
        DeValue::Table(inner) => key_at(inner, at),
        DeValue::Array(all) if all.iter().any(|v| v.get_ref().is_table()) => {
            let tables = all.iter().filter_map(|v| v.get_ref().as_table());
            tables.into_iter().find_map(|inner| key_at(inner, at))
        }
        _ => is_at(value, at).then(|| key.get_ref().as_ref()),
    })
}

fn is_at(value: &Spanned<DeValue<'_>>, at: usize) -> bool {
    value.span().contains(&at)
}
