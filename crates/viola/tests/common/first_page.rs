// SPDX-License-Identifier: Apache-2.0
//! The book's first page, whose commands tests run as they are written there.

#![allow(dead_code)]

const PAGE: &str = include_str!("../../../../docs/src/start.md");

/// The part of the page that has this heading.
pub fn part(heading: &str) -> &'static str {
    let (_, part) = PAGE
        .split_once(heading)
        .unwrap_or_else(|| panic!("the first page has no part `{heading}`"));
    part.split("\n## ").next().unwrap_or(part)
}

/// The lines of a part's numbered steps, without those that are empty: one list for each step.
pub fn steps(heading: &str) -> Vec<Vec<&'static str>> {
    let mut steps: Vec<Vec<&str>> = Vec::new();
    for line in part(heading).lines() {
        if line.starts_with(|c: char| c.is_ascii_digit()) {
            steps.push(Vec::new());
        } else if let (Some(step), Some(line)) = (steps.last_mut(), line.strip_prefix("       ")) {
            step.push(line);
        }
    }
    steps
}
