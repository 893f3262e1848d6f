// SPDX-License-Identifier: Apache-2.0
//! The terminal: raw mode and the other screen, and back however this ends. A panic puts it back before it speaks
//! (ratatui's hook), signals are noted and looked at between two keys.

use std::io;
use std::time::Duration;

use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyModifiers};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{Clear, ClearType};
use ratatui::{DefaultTerminal, Terminal};

use super::app::{App, Key};
use super::draw::{Looks, draw};
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;

/// A terminal that is ours until this is dropped.
pub struct Screen {
    terminal: DefaultTerminal,
    looks: Looks,
}

/// What the operator did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// A key.
    Key(Key),
    /// Everything has to be drawn anew.
    Redraw,
    /// To end: Ctrl-C, SIGTERM, or a terminal that is gone.
    End,
    /// Nothing, in that time.
    Nothing,
}

fn failed(e: io::Error) -> Failure {
    Failure::run(format!("the terminal: {e}"))
}

impl Screen {
    /// Takes the terminal.
    pub fn open(looks: Looks) -> Outcome<Self> {
        interrupt::watch()?;
        let terminal = ratatui::try_init().map_err(|e| {
            ratatui::restore();
            failed(e)
        })?;
        Ok(Self { terminal, looks })
    }

    /// Shows the state.
    pub fn draw(&mut self, app: &App) -> Outcome {
        let looks = self.looks;
        self.terminal
            .draw(|frame| draw(frame, app, looks))
            .map(|_| ())
            .map_err(failed)
    }

    /// Height in lines.
    pub fn height(&self) -> usize {
        self.terminal.size().map_or(24, |s| s.height.into())
    }

    /// Waits for a key.
    pub fn input(&mut self, patience: Duration) -> Outcome<Input> {
        if interrupt::asked() {
            return Ok(Input::End);
        }
        match event::poll(patience) {
            Ok(false) => return Ok(Input::Nothing),
            Ok(true) => {}
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return Ok(Input::Nothing),
            Err(e) => return Err(failed(e)),
        }
        match event::read().map_err(failed)? {
            Event::Key(key) if !key.is_release() => self.pressed(key),
            Event::Resize(..) => Ok(Input::Redraw),
            _ => Ok(Input::Nothing),
        }
    }

    fn pressed(&mut self, key: KeyEvent) -> Outcome<Input> {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c') => Ok(Input::End),
                KeyCode::Char('l') => self.forget(),
                KeyCode::Char('z') => self.suspend(),
                _ => Ok(Input::Nothing),
            };
        }
        Ok(translate(key.code).map_or(Input::Nothing, Input::Key))
    }

    /// Gives the terminal back to the shell until that lets us go on.
    fn suspend(&mut self) -> Outcome<Input> {
        ratatui::restore();
        let itself = rustix::process::getpid();
        // Where the kernel refuses there is nothing to come back from.
        let _ = rustix::process::kill_process(itself, rustix::process::Signal::TSTP);
        self.terminal = ratatui::try_init().map_err(failed)?;
        self.forget()
    }

    /// Clears the screen and forgets what was on it. The library's own way asks the terminal where its cursor is, and fails where
    /// nobody answers.
    fn forget(&mut self) -> Outcome<Input> {
        execute!(io::stdout(), Clear(ClearType::All)).map_err(failed)?;
        self.terminal = Terminal::new(CrosstermBackend::new(io::stdout())).map_err(failed)?;
        Ok(Input::Redraw)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

fn translate(code: KeyCode) -> Option<Key> {
    Some(match code {
        KeyCode::Char(c) => Key::Char(c),
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Escape,
        KeyCode::Backspace => Key::Backspace,
        KeyCode::Up => Key::Up,
        KeyCode::Down => Key::Down,
        KeyCode::Left => Key::Left,
        KeyCode::Right => Key::Right,
        KeyCode::PageUp => Key::PageUp,
        KeyCode::PageDown => Key::PageDown,
        KeyCode::Home => Key::Home,
        KeyCode::End => Key::End,
        _ => return None,
    })
}
