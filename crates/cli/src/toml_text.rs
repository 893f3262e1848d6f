// SPDX-License-Identifier: Apache-2.0
//! Errors of TOML files as operators read them: the line, then the key, then what is wrong.

/// Number of the line that holds byte `at`, from 1.
pub fn line_of(text: &str, at: usize) -> usize {
    1 + text.bytes().take(at).filter(|&b| b == b'\n').count()
}

/// Makes one line of the parser's message about byte `at`, with the key in front.
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
    let start = text
        .get(..at)
        .and_then(|t| t.rfind('\n'))
        .map_or(0, |n| n + 1);
    let line = text[start..].lines().next().unwrap_or_default();
    match line.split_once('=') {
        Some((key, _)) if !key.trim().is_empty() && !key.contains('#') => {
            format!("{}: {message}", key.trim())
        }
        _ => message,
    }
}
