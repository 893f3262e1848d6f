// SPDX-License-Identifier: Apache-2.0
//! The lab by hand: `cargo run -p viola-lab --example lab -- up lab/four.toml`.

use std::process::ExitCode;

use viola_lab::{Error, cli};

const USAGE: &str = "usage: lab up [--foreground] FILE | sh GUEST [-- COMMAND...] | net [LAB] -- COMMAND... |\n\
                     \x20      list | reboot GUEST | down [LAB] | sweep";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (before, command) = match words.iter().position(|word| word == "--") {
        Some(at) => (&words[..at], &words[at + 1..]),
        None => (&words[..], &[][..]),
    };
    let before: Vec<&str> = before.iter().map(String::as_str).collect();
    let done = match before[..] {
        ["up", file] => up(file, false),
        ["up", "--foreground", file] => up(file, true),
        ["supervise", file] => {
            return ExitCode::from(u8::from(cli::supervise(file.as_ref()).is_err()));
        }
        ["sh", guest] => cli::sh(guest, command),
        ["net"] => cli::net(None, command).map(|never| match never {}),
        ["net", lab] => cli::net(Some(lab), command).map(|never| match never {}),
        ["list"] => {
            print!("{}", cli::list());
            Ok(0)
        }
        ["reboot", guest] => cli::reboot(guest).map(|()| 0),
        ["down"] => down(None),
        ["down", lab] => down(Some(lab)),
        ["sweep"] => cli::sweep().map(|swept| {
            println!("swept {} lab(s) {}", swept.len(), swept.join(" "));
            0
        }),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("lab: {}", error.full());
            ExitCode::from(error.exit_code())
        }
    }
}

fn up(file: &str, foreground: bool) -> Result<u8, Error> {
    let options = cli::Up {
        spec: file.into(),
        foreground,
        supervise: vec!["supervise".into()],
    };
    cli::up(&options).map(|()| 0)
}

fn down(lab: Option<&str>) -> Result<u8, Error> {
    println!("lab `{}` is down", cli::down(lab)?);
    Ok(0)
}
