// SPDX-License-Identifier: Apache-2.0
//! Finds a VM by name or identity, and suggests names after a typo.

use viola_cli::quantities::quoted;

/// Why a name identifies no VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotFound {
    /// No VM has the name; these names are similar.
    Unknown(Vec<String>),
    /// Several VMs have it; their identities.
    Ambiguous(Vec<String>),
}

/// The index of a VM among (name, identity), by its identity or else by its name.
///
/// # Errors
/// When no VM or several have the name.
pub fn find<'a>(
    vms: impl Iterator<Item = (&'a str, &'a str)> + Clone,
    name: &str,
) -> Result<usize, NotFound> {
    if let Some(i) = vms.clone().position(|(_, id)| id == name) {
        return Ok(i);
    }
    let named: Vec<(usize, &str)> = vms
        .clone()
        .enumerate()
        .filter(|(_, (n, _))| *n == name)
        .map(|(i, (_, id))| (i, id))
        .collect();
    match named[..] {
        [(i, _)] => Ok(i),
        [] => Err(NotFound::Unknown(nearest(name, vms))),
        _ => Err(NotFound::Ambiguous(
            named.iter().map(|(_, id)| (*id).to_owned()).collect(),
        )),
    }
}

impl NotFound {
    /// HTTP status and body for a request that named `name`.
    pub fn answer(self, name: &str) -> (u16, viola_proto::Error) {
        let name = quoted(name);
        let (status, error, nearest) = match self {
            Self::Unknown(near) if near.is_empty() => {
                (404, format!("there is no VM {name} on this host"), near)
            }
            Self::Unknown(near) => (
                404,
                format!(
                    "there is no VM {name} on this host; near it: {}",
                    near.join(", ")
                ),
                near,
            ),
            Self::Ambiguous(ids) => (
                409,
                format!(
                    "several VMs are called {name}; name one by its identity: {}",
                    ids.join(", ")
                ),
                ids,
            ),
        };
        (status, viola_proto::Error { error, nearest })
    }
}

/// Up to three names similar to `name`, the most similar first.
fn nearest<'a>(name: &str, vms: impl Iterator<Item = (&'a str, &'a str)>) -> Vec<String> {
    let name: String = name.chars().take(100).collect::<String>().to_lowercase();
    let mut near: Vec<(usize, &str)> = vms
        .filter_map(|(other, id)| {
            let lower = other.to_lowercase();
            let typos = distance(&name, &lower).min(distance(&name, id));
            let inside = name.chars().count() >= 2 && lower.contains(&name);
            (inside || typos <= 2 && typos < lower.chars().count()).then_some((typos, other))
        })
        .collect();
    near.sort_unstable();
    near.dedup();
    near.into_iter()
        .take(3)
        .map(|(_, n)| n.to_owned())
        .collect()
}

/// Levenshtein distance, in characters.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(200).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let change = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    const VMS: [(&str, &str); 4] = [
        ("db01", "uml:db01"),
        ("db02", "uml:db02"),
        ("web", "qemu:web"),
        ("web", "uml:web"),
    ];

    #[test]
    fn a_vm_is_found_by_name_or_identity() {
        let find = |name| find(VMS.into_iter(), name);
        assert_eq!(find("db01"), Ok(0));
        assert_eq!(find("uml:web"), Ok(3));
        let (status, e) = find("web").unwrap_err().answer("web");
        assert_eq!(status, 409);
        assert_eq!(e.nearest, ["qemu:web", "uml:web"]);
    }

    #[test]
    fn a_typo_is_answered_with_similar_names() {
        let near = |name: &str| match find(VMS.into_iter(), name) {
            Err(NotFound::Unknown(n)) => n,
            other => panic!("{other:?}"),
        };
        assert_eq!(near("db1"), ["db01", "db02"]);
        assert_eq!(near("DB02"), ["db02", "db01"]);
        assert_eq!(near("we"), ["web"]);
        assert!(near("mail").is_empty());
        assert!(near("").is_empty());
        assert!(near(&"x".repeat(100_000)).is_empty());
        let (status, e) = find(VMS.into_iter(), "db1").unwrap_err().answer("db1");
        assert_eq!(
            (status, e.error.as_str()),
            (
                404,
                "there is no VM \"db1\" on this host; near it: db01, db02"
            )
        );
    }

    #[test]
    fn distance_counts_letters() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "ab"), 2);
        assert_eq!(distance("ab", "ab"), 0);
    }
}
