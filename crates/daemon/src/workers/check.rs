// SPDX-License-Identifier: Apache-2.0
//! What `viola check` says of the protections of workers: what this kernel gives, and what it lacks.

use viola_proto::{Row, RowState};
use viola_vread::sandbox::{FULL_LANDLOCK_ABI, MIN_LANDLOCK_ABI, landlock_abi};

/// The row about workers.
pub fn row() -> Row {
    row_of(landlock_abi())
}

fn row_of(abi: u32) -> Row {
    let row = |state, value: &str, why: String, change: Option<&str>| Row {
        name: "workers".into(),
        state,
        value: value.into(),
        why,
        change: change.map(str::to_owned),
    };
    // What a version of Landlock's interface lacks of the rules that workers use.
    let missing = match abi {
        ..MIN_LANDLOCK_ABI => {
            return row(
                RowState::No,
                "no",
                "vread and vpipe are off: this kernel has no Landlock".into(),
                Some("add landlock to lsm= on its command line"),
            );
        }
        FULL_LANDLOCK_ABI.. => {
            let why = format!("own users, seccomp, Landlock {abi} (files, TCP, signals)");
            return row(RowState::Yes, "ok", why, None);
        }
        MIN_LANDLOCK_ABI..4 => "TCP ports, signals and abstract sockets are held by seccomp only",
        4..FULL_LANDLOCK_ABI => "signals and abstract sockets are held by seccomp only",
    };
    let why = format!("own users, seccomp, Landlock {abi}: {missing}");
    row(RowState::Info, "ok", why, Some("Linux 6.12 has all of it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_kernel_lacks_is_said() {
        let none = row_of(0);
        assert_eq!((none.state, none.value.as_str()), (RowState::No, "no"));
        assert!(none.why.contains("no Landlock"));
        for (abi, lacks) in [
            (1, "TCP ports"),
            (4, "signals and abstract"),
            (5, "signals"),
        ] {
            let row = row_of(abi);
            assert_eq!(row.state, RowState::Info);
            assert!(row.why.contains(lacks), "{row:?}");
        }
        for abi in [6, 7] {
            assert_eq!(row_of(abi).state, RowState::Yes);
        }
    }
}
