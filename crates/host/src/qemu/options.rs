// SPDX-License-Identifier: Apache-2.0
//! The syntax of one QEMU option: `key=value,...` or a JSON object.

use serde_json::Value;

/// Keys and values of one option, in order; the last value of a repeated key counts.
pub(super) type Options = Vec<(String, String)>;

pub(super) fn get<'a>(options: &'a Options, key: &str) -> Option<&'a str> {
    let hit = options.iter().rev().find(|(k, _)| k == key)?;
    Some(hit.1.as_str())
}

pub(super) fn is_on(options: &Options, key: &str) -> bool {
    get(options, key).is_some_and(|v| matches!(v, "on" | "yes" | "true"))
}

/// Splits `a=1,b=x,,y,flag`: two commas stand for one in a value, a first part without a key is the value of `implied`, a
/// later one is switched on. Reads a JSON object too, with dots between its levels.
pub(super) fn options(text: &str, implied: &str) -> Options {
    if text.starts_with('{') {
        let mut flat = Options::new();
        if let Ok(value) = serde_json::from_str::<Value>(text) {
            flatten("", &value, &mut flat);
        }
        return flat;
    }
    let mut found = Options::new();
    let mut rest = text;
    let mut first = true;
    while !rest.is_empty() {
        let (part, after) = next_part(rest);
        rest = after;
        match part.split_once('=') {
            Some((key, value)) => found.push((key.to_owned(), value.to_owned())),
            None if first => found.push((implied.to_owned(), part)),
            None => found.push((part, "on".to_owned())),
        }
        first = false;
    }
    found
}

/// The text up to a single comma, and what follows that comma.
fn next_part(text: &str) -> (String, &str) {
    let mut part = String::new();
    let mut rest = text;
    loop {
        let Some((before, after)) = rest.split_once(',') else {
            part.push_str(rest);
            return (part, "");
        };
        part.push_str(before);
        match after.strip_prefix(',') {
            Some(escaped) => {
                part.push(',');
                rest = escaped;
            }
            None => return (part, after),
        }
    }
}

/// Recursion is bounded: serde_json bounds the depth of `value`.
fn flatten(prefix: &str, value: &Value, out: &mut Options) {
    let below = |key: &str| {
        if prefix.is_empty() {
            key.to_owned()
        } else {
            format!("{prefix}.{key}")
        }
    };
    match value {
        Value::Object(map) => map.iter().for_each(|(k, v)| flatten(&below(k), v, out)),
        Value::Array(list) => list
            .iter()
            .enumerate()
            .for_each(|(i, v)| flatten(&below(&i.to_string()), v, out)),
        Value::String(s) => out.push((prefix.to_owned(), s.clone())),
        Value::Bool(b) => out.push((prefix.to_owned(), if *b { "on" } else { "off" }.to_owned())),
        Value::Number(n) => out.push((prefix.to_owned(), n.to_string())),
        Value::Null => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn commas_keys_and_flags_are_read_as_qemu_does() {
        let o = options("web,,1,debug-threads=on,flag,guest=late", "guest");
        assert_eq!(o[0], ("guest".to_owned(), "web,1".to_owned()));
        assert_eq!(get(&o, "guest"), Some("late"));
        assert!(is_on(&o, "debug-threads") && is_on(&o, "flag"));
        assert_eq!(options("", "x"), Options::new());
        assert_eq!(get(&options(",,,a=1", "x"), "x"), Some(","));
    }

    proptest! {
        #[test]
        fn doubled_commas_stand_for_one(value in "[a-z,]{0,20}") {
            let escaped = format!("key={},next=1", value.replace(',', ",,"));
            let parsed = options(&escaped, "x");
            prop_assert_eq!(get(&parsed, "key"), Some(value.as_str()));
            prop_assert_eq!(get(&parsed, "next"), Some("1"));
        }
    }
}
