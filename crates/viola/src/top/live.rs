// SPDX-License-Identifier: Apache-2.0
//! A running daemon as source. A thread of its own sends the requests, so keys work while the
//! daemon does not answer.

use std::path::Path;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::Duration;

use viola_proto::Event;

use super::app::{App, Link, Then};
use super::draw::Looks;
use super::terminal::{Input, Screen};
use crate::commands;
use crate::record::{self, Moment, UnseenEvents};
use viola_cli::client::Client;
use viola_cli::error::{Failure, Outcome};

/// Interval of requests.
const INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which the screen takes replies while the operator presses no key.
const NAP: Duration = Duration::from_millis(100);

type Heard = Result<(Moment, Vec<Event>), String>;

/// Runs until the operator quits.
///
/// # Errors
/// When the terminal fails.
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

/// Takes the replies that have arrived; `true` when there was one.
fn listen(app: &mut App, heard: &Receiver<Heard>) -> Outcome<bool> {
    let mut any = false;
    loop {
        match heard.try_recv() {
            Ok(Ok((moment, events))) => app.heard(moment, events),
            Ok(Err(why)) => app.lost(why),
            Err(TryRecvError::Empty) => return Ok(any),
            Err(TryRecvError::Disconnected) => {
                return Err(Failure::run("the thread that asks the daemon has ended"));
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
            let mut news = UnseenEvents::default();
            loop {
                let answer = match record::request(&client) {
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
