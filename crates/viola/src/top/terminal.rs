// SPDX-License-Identifier: Apache-2.0
//! The terminal in raw mode and on its alternate screen, restored at the end. ratatui's panic hook restores it before the
//! message of a panic; signals set a flag that is read between two keys.

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

/// The terminal in raw mode; dropping it restores the terminal.
pub struct Screen {
    terminal: DefaultTerminal,
    looks: Looks,
}

/// Input of the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// A key.
    Key(Key),
    /// The whole screen has to be redrawn.
    Redraw,
    /// Quit: Ctrl-C, SIGTERM, or a hangup of the terminal.
    End,
    /// No input within the timeout.
    Nothing,
}

fn failed(e: io::Error) -> Failure {
    Failure::run(format!("the terminal: {e}"))
}

impl Screen {
    /// Switches the terminal to raw mode.
    ///
    /// # Errors
    /// When the terminal or a signal handler cannot be set up.
    pub fn open(looks: Looks) -> Outcome<Self> {
        interrupt::watch()?;
        let terminal = ratatui::try_init().map_err(|e| {
            ratatui::restore();
            failed(e)
        })?;
        Ok(Self { terminal, looks })
    }

    /// Draws the state.
    ///
    /// # Errors
    /// When the terminal fails.
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

    /// Waits for a key, at most for `patience`.
    ///
    /// # Errors
    /// When the terminal fails.
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

    /// Restores the terminal and stops (SIGTSTP) until the shell continues the process.
    fn suspend(&mut self) -> Outcome<Input> {
        ratatui::restore();
        let itself = rustix::process::getpid();
        // If the kernel refuses the signal, the process was not stopped.
        let _ = rustix::process::kill_process(itself, rustix::process::Signal::TSTP);
        self.terminal = ratatui::try_init().map_err(failed)?;
        self.forget()
    }

    /// Clears the screen and the library's copy of it. The library's own function asks the terminal for its cursor, and fails
    /// on terminals that do not reply.
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
