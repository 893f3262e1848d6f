// SPDX-License-Identifier: Apache-2.0
//! Who may confirm a VM, from `[[launcher]]` of the configuration.

use viola_config::Config;
use viola_host::confirm::{Launcher, Sources};

use super::users;

/// The sources of confirmations, and one sentence for each entry that cannot count.
pub fn sources(config: &Config) -> (Sources, Vec<String>) {
    let mut left_out = Vec::new();
    let mut launchers = Vec::new();
    for launcher in &config.launchers {
        let user = launcher.user.as_deref();
        let number = user.and_then(|name| match name.parse() {
            Ok(number) => Some(number),
            Err(_) => users::user_ids(name).map(|(uid, _)| uid),
        });
        if let (Some(name), None) = (user, number) {
            left_out.push(format!(
                "[[launcher]] user: this host has no user {name}, so the entry is left out"
            ));
            continue;
        }
        launchers.push(Launcher {
            program: launcher.program.clone(),
            user: number,
            cgroup: launcher.cgroup.clone(),
        });
    }
    let sources = Sources {
        launchers,
        ..Sources::default()
    };
    (sources, left_out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn users_are_numbers_and_unknown_ones_leave_their_entry_out() {
        let text = "[[launcher]]\ncgroup = \"/qemu.slice/*\"\n\
                    [[launcher]]\nprogram = \"/usr/bin/kvm\"\nuser = \"root\"\n\
                    [[launcher]]\nprogram = \"/usr/bin/kvm\"\nuser = \"64055\"\n\
                    [[launcher]]\ncgroup = \"/a\"\nuser = \"no-such-user\"\n";
        let config = Config::parse(Path::new("v.toml"), text).unwrap();
        let (sources, left_out) = sources(&config);
        let users: Vec<Option<u32>> = sources.launchers.iter().map(|l| l.user).collect();
        assert_eq!(users, [None, Some(0), Some(64055)]);
        assert_eq!(
            left_out,
            ["[[launcher]] user: this host has no user no-such-user, so the entry is left out"]
        );
    }
}
