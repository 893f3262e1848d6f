// SPDX-License-Identifier: Apache-2.0
//! What `viola-agent status` shows of a turbo vCPU.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::knob::Part;

/// State of the turbo vCPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// Its number in this VM.
    pub cpu: u32,
    /// Whether the changes are in force.
    pub active: bool,
    /// One sentence.
    pub state: String,
    /// How applications are kept off it: `partition`, `slices`, `threads` or `left`.
    pub applications: String,
    /// Changed settings.
    pub changes: Vec<Change>,
    /// What stays although the goal says otherwise, and why.
    pub left: Vec<Left>,
}

/// A changed setting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// What it belongs to.
    pub part: Part,
    /// What it is.
    pub what: String,
    /// What it was.
    pub from: String,
    /// What it is now.
    pub to: String,
}

/// A setting that is left alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// What it belongs to.
    pub part: Part,
    /// One sentence.
    pub why: String,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "turbo vCPU {}: {}", self.cpu, self.state)?;
        let mut parts: BTreeMap<Part, Vec<&Change>> = BTreeMap::new();
        for change in &self.changes {
            parts.entry(change.part).or_default().push(change);
        }
        for (part, changes) in parts {
            write!(f, "  {}: {} changed", part.word(), changes.len())?;
            // a single change is shown by name
            if let [only] = changes[..] {
                write!(
                    f,
                    " ({}: {} -> {})",
                    only.what,
                    or_none(&only.from),
                    only.to
                )?;
            }
            writeln!(f)?;
        }
        for left in &self.left {
            writeln!(f, "  {}, left: {}", left.part.word(), left.why)?;
        }
        Ok(())
    }
}

fn or_none(text: &str) -> &str {
    if text.is_empty() { "none" } else { text }
}
