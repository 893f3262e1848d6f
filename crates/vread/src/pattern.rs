// SPDX-License-Identifier: Apache-2.0
//! Matches names with the wildcards `*` and `?`.

/// Whether a name matches a pattern: `*` stands for any text, `?` for any one character, every other character for
/// itself.
#[must_use]
pub fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    // Position of the last star, and the end of the text that it covers so far.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        if p < pattern.len() && pattern[p] == '*' {
            star = Some((p, n));
            p += 1;
        } else if p < pattern.len() && (pattern[p] == '?' || pattern[p] == name[n]) {
            p += 1;
            n += 1;
        } else if let Some((at, covered)) = star {
            star = Some((at, covered + 1));
            p = at + 1;
            n = covered + 1;
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn stars_and_question_marks_stand_for_others() {
        for (pattern, name, is) in [
            ("dn*", "dn1", true),
            ("dn*", "dn", true),
            ("dn*", "xdn", false),
            ("*", "", true),
            ("", "", true),
            ("", "a", false),
            ("dn?", "dn12", false),
            ("dn?", "dn1", true),
            ("*-data-*", "a-data-data-b", true),
            ("a*b*c", "abbbc", true),
            ("a*b*c", "abbb", false),
            ("[a]", "a", false),
        ] {
            assert_eq!(matches(pattern, name), is, "{pattern} {name}");
        }
    }

    /// The recursive definition, which is slow for many stars.
    fn slow(p: &[char], n: &[char]) -> bool {
        match (p.first(), n.first()) {
            (None, None) => true,
            (Some('*'), _) => slow(&p[1..], n) || (!n.is_empty() && slow(p, &n[1..])),
            (Some('?'), Some(_)) => slow(&p[1..], &n[1..]),
            (Some(a), Some(b)) => a == b && slow(&p[1..], &n[1..]),
            _ => false,
        }
    }

    proptest! {
        #[test]
        fn it_is_the_plain_definition(pattern in "[ab*?]{0,7}", name in "[ab]{0,8}") {
            let chars = |t: &str| t.chars().collect::<Vec<_>>();
            prop_assert_eq!(matches(&pattern, &name), slow(&chars(&pattern), &chars(&name)));
        }
    }
}
