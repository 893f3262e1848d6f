// SPDX-License-Identifier: Apache-2.0
//! A recording as source.

use std::path::Path;
use std::time::{Duration, Instant};

use super::app::{App, KEPT, Link, Then};
use super::draw::Looks;
use super::terminal::{Input, Screen};
use crate::record::{Recording, ReplayError};
use viola_cli::error::Outcome;

/// A recording and the position in it.
pub struct Replay {
    recording: Recording,
    app: App,
}

impl Replay {
    /// Opens a recording at its first moment.
    ///
    /// # Errors
    /// As [`Recording::open`].
    pub fn open(path: &Path) -> Result<Self, ReplayError> {
        let mut recording = Recording::open(path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let trouble = match recording.broken {
            0 => None,
            1 => Some("one line of it cannot be read".to_owned()),
            n => Some(format!("{n} lines of it cannot be read")),
        };
        let link = Link::Replay {
            at: 0,
            of: recording.len(),
            speed: 1,
            trouble,
        };
        let mut app = App::new(format!("{} {name}", recording.host), link);
        app.know(std::mem::take(&mut recording.events));
        let mut replay = Self { recording, app };
        replay.go(0);
        Ok(replay)
    }

    /// Moves to another moment, and loads those before it for histories.
    fn go(&mut self, to: usize) {
        let Link::Replay { at, trouble, .. } = &mut self.app.link else {
            return;
        };
        let first = match to == *at + 1 && !self.app.past.is_empty() {
            true => to,
            false => {
                self.app.past.clear();
                (to + 1).saturating_sub(KEPT)
            }
        };
        *at = to;
        let mut found = Vec::new();
        for i in first..=to {
            match self.recording.moment(i) {
                Ok(moment) => found.push(moment),
                Err(e) => *trouble = Some(e.to_string()),
            }
        }
        found.into_iter().for_each(|moment| self.app.push(moment));
    }

    /// Runs until the operator quits.
    ///
    /// # Errors
    /// When the terminal fails.
    pub fn run(mut self, looks: Looks) -> Outcome {
        let mut screen = Screen::open(looks)?;
        let (mut stale, mut shown) = (true, Instant::now());
        loop {
            if std::mem::take(&mut stale) {
                screen.draw(&self.app)?;
            }
            let Link::Replay { at, of, speed, .. } = self.app.link else {
                return Ok(());
            };
            let each = Duration::from_secs(1) / speed;
            match screen.input(each.min(Duration::from_millis(100)))? {
                Input::End => return Ok(()),
                Input::Nothing => {}
                Input::Redraw => stale = true,
                Input::Key(key) => {
                    stale = true;
                    match self.app.key(key, screen.height()) {
                        Then::Quit => return Ok(()),
                        Then::Go(to) => self.go(to),
                        Then::Draw => {}
                    }
                }
            }
            if !self.app.still && shown.elapsed() >= each {
                shown = Instant::now();
                match at + 1 < of {
                    true => self.go(at + 1),
                    false => self.app.still = true,
                }
                stale = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Writer;
    use crate::testing::moment;

    #[test]
    fn a_jump_brings_what_was_before_and_a_step_only_adds() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r");
        let mut writer = Writer::open(&path, "h").unwrap();
        for i in 0..KEPT as u64 + 20 {
            writer.moment(&moment(i * 1000, &["a"]), &[]).unwrap();
        }
        let mut replay = Replay::open(&path).unwrap();
        let times = |r: &Replay| {
            let at = |m: Option<&crate::record::Moment>| m.unwrap().at_ms / 1000;
            (at(r.app.past.front()), at(r.app.past.back()))
        };
        assert_eq!(times(&replay), (0, 0));
        replay.go(1);
        assert_eq!(times(&replay), (0, 1));
        replay.go(KEPT + 10);
        assert_eq!(times(&replay), (11, KEPT as u64 + 10));
        replay.go(KEPT + 11);
        assert_eq!(times(&replay), (12, KEPT as u64 + 11));
        replay.go(5);
        assert_eq!(times(&replay), (0, 5));
    }
}
