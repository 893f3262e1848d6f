// SPDX-License-Identifier: Apache-2.0
//! A running daemon: a thread asks it once a second, so that one that does not answer holds no key up.

use std::path::Path;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::Duration;

use viola_proto::Event;

use super::app::{App, Link, Then};
use super::draw::Looks;
use super::terminal::{Input, Screen};
use crate::commands;
use crate::record::{self, Moment, News};
use viola_cli::client::Client;
use viola_cli::error::{Failure, Outcome};

/// Time between two questions.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long a key waits for what has come in.
const NAP: Duration = Duration::from_millis(100);

type Heard = Result<(Moment, Vec<Event>), String>;

/// Shows it until the operator has seen enough.
pub fn run(socket: &Path, looks: Looks) -> Outcome {
    let heard = ask(Client::new(socket))?;
    let mut app = App::new(commands::host(), Link::Live(None));
    let mut screen = Screen::open(looks)?;
    let mut stale = true;
    loop {
        stale |= listen(&mut app, &heard)?;
        if std::mem::take(&mut stale) {
            screen.draw(&app)?;
        }
        match screen.input(NAP)? {
            Input::End => return Ok(()),
            Input::Nothing => {}
            Input::Redraw => stale = true,
            Input::Key(key) => {
                if app.key(key, screen.height()) == Then::Quit {
                    return Ok(());
                }
                stale = true;
            }
        }
    }
}

/// Takes what has come in; `true` when that was anything.
fn listen(app: &mut App, heard: &Receiver<Heard>) -> Outcome<bool> {
    let mut any = false;
    loop {
        match heard.try_recv() {
            Ok(Ok((moment, events))) => app.heard(moment, events),
            Ok(Err(why)) => app.lost(why),
            Err(TryRecvError::Empty) => return Ok(any),
            Err(TryRecvError::Disconnected) => {
                return Err(Failure::run("nobody asks the daemon any more"));
            }
        }
        any = true;
    }
}

fn ask(client: Client) -> Outcome<Receiver<Heard>> {
    let (tell, heard) = mpsc::sync_channel(2);
    std::thread::Builder::new()
        .name("asking".into())
        .spawn(move || {
            let mut news = News::default();
            loop {
                let answer = match record::ask(&client) {
                    Ok((moment, events)) => Ok((moment, news.of(events))),
                    Err(e) => Err(e.to_string()),
                };
                if tell.send(answer).is_err() {
                    return;
                }
                std::thread::sleep(INTERVAL);
            }
        })
        .map_err(Failure::run)?;
    Ok(heard)
}
