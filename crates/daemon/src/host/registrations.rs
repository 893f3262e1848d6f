// SPDX-License-Identifier: Apache-2.0
//! Notices at each tick that a launcher has registered a VM (`viola register`), so that the daemon scans the host at once.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::inotify;

/// Watches the folder of registrations.
#[derive(Debug)]
pub struct RegistrationWatch {
    folder: PathBuf,
    inotify: Option<OwnedFd>,
}

impl RegistrationWatch {
    /// Watches a folder. If it does not exist yet, [`RegistrationWatch::renew`] watches it later.
    pub fn of(folder: &Path) -> Self {
        let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
        let watch = Self {
            folder: folder.to_owned(),
            inotify: inotify::init(flags).ok(),
        };
        watch.renew();
        watch
    }

    /// Watches the folder if it exists and is not watched yet, for example because it was made after the last call.
    pub fn renew(&self) {
        use inotify::WatchFlags;
        if let Some(fd) = &self.inotify {
            // A registration is written under another name, and then renamed.
            let changes = WatchFlags::MOVED_TO | WatchFlags::DELETE;
            // This fails while the folder does not exist: nothing is registered then.
            let _ = inotify::add_watch(fd, &self.folder, changes | WatchFlags::ONLYDIR);
        }
    }

    /// Whether a registration came or went since the last call.
    pub fn take_changed(&self) -> bool {
        let Some(fd) = &self.inotify else {
            return false;
        };
        let mut has_changed = false;
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(fd, &mut buffer);
        while events.next().is_ok() {
            has_changed = true;
        }
        has_changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registrations_that_come_and_go_are_noticed_once() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("vms");
        let watch = RegistrationWatch::of(&folder);
        assert!(!watch.take_changed());
        std::fs::create_dir(&folder).unwrap();
        watch.renew();
        assert!(!watch.take_changed());
        let register = |name: &str| {
            std::fs::write(folder.join(".new"), "a").unwrap();
            std::fs::rename(folder.join(".new"), folder.join(name)).unwrap();
        };
        register("7");
        assert!(watch.take_changed());
        assert!(!watch.take_changed());
        watch.renew();
        std::fs::remove_file(folder.join("7")).unwrap();
        assert!(watch.take_changed());
        // A folder that was made anew is watched from the next scan on.
        std::fs::remove_dir(&folder).unwrap();
        std::fs::create_dir(&folder).unwrap();
        watch.take_changed();
        watch.renew();
        register("8");
        assert!(watch.take_changed());
    }
}
