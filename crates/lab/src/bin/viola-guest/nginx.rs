// SPDX-License-Identifier: Apache-2.0
//! The workload `nginx`: Debian's nginx.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::RUN;

/// Writes the configuration and the pages. Returns the command that runs nginx in the foreground.
pub fn prepare(name: &str, port: u16, sizes_kib: &[u32]) -> Result<Command, String> {
    let folder = format!("{RUN}/{name}.nginx");
    let text = |e: std::io::Error| format!("{folder}: {e}");
    pages(&format!("{folder}/www"), sizes_kib).map_err(text)?;
    fs::create_dir_all(format!("{folder}/tmp")).map_err(text)?;
    let configuration = format!(
        "user root root;\n\
         worker_processes 1;\n\
         daemon off;\n\
         pid {folder}/pid;\n\
         error_log {folder}/error.log;\n\
         events {{ worker_connections 512; }}\n\
         http {{\n\
           access_log off;\n\
           sendfile on;\n\
           tcp_nodelay on;\n\
           keepalive_requests 1000000;\n\
           default_type text/plain;\n\
           client_body_temp_path {folder}/tmp/1;\n\
           proxy_temp_path {folder}/tmp/2;\n\
           fastcgi_temp_path {folder}/tmp/3;\n\
           uwsgi_temp_path {folder}/tmp/4;\n\
           scgi_temp_path {folder}/tmp/5;\n\
           server {{\n\
             listen {port} backlog=512;\n\
             root {folder}/www;\n\
             location = /status {{ stub_status; }}\n\
           }}\n\
         }}\n"
    );
    let path = format!("{folder}/nginx.conf");
    fs::write(&path, configuration).map_err(text)?;
    let log = fs::File::create(format!("{folder}/start.log")).map_err(text)?;
    let mut command = Command::new("/usr/sbin/nginx");
    command
        .args(["-c", &path, "-e", &format!("{folder}/error.log")])
        .stderr(log);
    Ok(command)
}

/// Writes a page `pageNk` of each size N.
pub fn pages(folder: &str, sizes_kib: &[u32]) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    for kib in sizes_kib {
        let line = "The quick brown fox jumps over the lazy dog, and again, and again.\n";
        let page: String = line.chars().cycle().take(*kib as usize * 1024).collect();
        fs::write(format!("{folder}/page{kib}k"), page)?;
    }
    Ok(())
}

/// Waits until nginx answers.
pub fn wait(name: &str, port: u16) -> Result<(), String> {
    wait_for("nginx", &format!("{RUN}/{name}.nginx"), || {
        requests(port).is_some()
    })
}

/// Waits until a web server is up; its error has the logs of this folder.
pub fn wait_for(server: &str, folder: &str, is_up: impl Fn() -> bool) -> Result<(), String> {
    let begin = Instant::now();
    while !is_up() {
        if begin.elapsed() > Duration::from_secs(20) {
            let log = |file| fs::read_to_string(format!("{folder}/{file}")).unwrap_or_default();
            return Err(format!(
                "{server} does not answer: {}{}",
                log("start.log"),
                log("error.log")
            ));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Requests served so far, without those of this function.
pub fn requests(port: u16) -> Option<u64> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    stream.write_all(b"GET /status HTTP/1.0\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    total(&answer)
}

/// The third number below `server accepts handled requests`.
fn total(answer: &str) -> Option<u64> {
    let numbers = answer.split("handled requests").nth(1)?;
    numbers.split_whitespace().nth(2)?.parse().ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn requests_are_read_from_the_status_page() {
        let page = "Active connections: 1 \nserver accepts handled requests\n 3 3 17 \nReading: 0 Writing: 1 Waiting: 0 \n";
        assert_eq!(super::total(page), Some(17));
        assert_eq!(super::total("404"), None);
    }
}
