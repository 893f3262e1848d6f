// SPDX-License-Identifier: Apache-2.0
//! The workload `apache`: Debian's Apache.

use std::fs;
use std::net::{Ipv4Addr, TcpStream};
use std::process::Command;

use crate::{RUN, nginx};

const MODULES: &str = "/usr/lib/apache2/modules";

/// Writes the configuration and the pages. Returns the command that runs Apache in the foreground.
pub fn prepare(name: &str, port: u16, sizes_kib: &[u32]) -> Result<Command, String> {
    let folder = format!("{RUN}/{name}.apache");
    let text = |e: std::io::Error| format!("{folder}: {e}");
    nginx::pages(&format!("{folder}/www"), sizes_kib).map_err(text)?;
    let path = format!("{folder}/apache.conf");
    fs::write(&path, configuration(&folder, port)).map_err(text)?;
    let log = fs::File::create(format!("{folder}/start.log")).map_err(text)?;
    let mut command = Command::new("/usr/sbin/apache2");
    command
        .args(["-f", &path, "-D", "FOREGROUND"])
        .stdout(log.try_clone().map_err(text)?)
        .stderr(log);
    Ok(command)
}

/// The event module as in Debian, with one process from the start.
fn configuration(folder: &str, port: u16) -> String {
    format!(
        "ServerRoot {folder}\n\
         ServerName lab\n\
         PidFile {folder}/pid\n\
         ErrorLog {folder}/error.log\n\
         DefaultRuntimeDir {folder}\n\
         LoadModule mpm_event_module {MODULES}/mod_mpm_event.so\n\
         LoadModule authz_core_module {MODULES}/mod_authz_core.so\n\
         User nobody\n\
         Group nogroup\n\
         StartServers 1\n\
         ServerLimit 1\n\
         ThreadLimit 64\n\
         ThreadsPerChild 64\n\
         MaxRequestWorkers 64\n\
         MaxConnectionsPerChild 0\n\
         Listen {port}\n\
         DocumentRoot {folder}/www\n\
         <Directory {folder}/www>\n\
         Require all granted\n\
         </Directory>\n"
    )
}

/// Waits until Apache takes connections.
pub fn wait(name: &str, port: u16) -> Result<(), String> {
    nginx::wait_for("Apache", &format!("{RUN}/{name}.apache"), || {
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok()
    })
}
