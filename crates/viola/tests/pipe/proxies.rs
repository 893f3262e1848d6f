// SPDX-License-Identifier: Apache-2.0
//! Unmodified haproxy from Debian in a VM, in front of a web server on the host's side. The host relays large responses.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use crate::client::Client;
use crate::rig::{HOST, MIB, Rig, Server, noise};

const BACKEND: u16 = 9000;
const PROXY: Server = Server {
    name: "haproxy",
    port: 80,
    config: "global
  maxconn 200
defaults
  mode http
  option splice-response
  timeout connect 10s
  timeout client 30s
  timeout server 30s
listen web
  bind :80
  server one 10.77.0.1:9000
",
    start: "haproxy -D -f /tmp/n/haproxy.conf",
};

/// Answers `/N` with the first N bytes, `/cutN` with half of them.
fn serve(rig: &Rig, bytes: &Arc<Vec<u8>>) {
    let bytes = Arc::clone(bytes);
    rig.lab
        .in_netns(|| {
            let listener = TcpListener::bind((HOST, BACKEND)).unwrap();
            std::thread::spawn(move || {
                for client in listener.incoming().flatten() {
                    let bytes = Arc::clone(&bytes);
                    // A client that closes early is no failure.
                    std::thread::spawn(move || drop(answer(client, &bytes)));
                }
            });
        })
        .unwrap();
}

fn answer(mut client: TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    let mut questions = BufReader::new(client.try_clone()?);
    loop {
        let mut path = String::new();
        loop {
            let mut line = String::new();
            if questions.read_line(&mut line)? == 0 {
                return Ok(());
            }
            if let Some(rest) = line.strip_prefix("GET /") {
                path = rest.split(' ').next().unwrap_or_default().to_owned();
            }
            if line.trim_end().is_empty() {
                break;
            }
        }
        let (number, is_cut) = match path.strip_prefix("cut") {
            Some(number) => (number, true),
            None => (path.as_str(), false),
        };
        let length: usize = number.parse().unwrap_or(0);
        write!(
            client,
            "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n"
        )?;
        if is_cut {
            client.write_all(&bytes[..length / 2])?;
            return client.shutdown(Shutdown::Both);
        }
        client.write_all(&bytes[..length])?;
    }
}

#[test]
fn the_host_relays_what_a_proxy_splices() {
    let rig = Rig::boot("pi-proxy");
    let bytes = Arc::new(noise(77, 64 * MIB));
    serve(&rig, &bytes);
    rig.web.start(&PROXY, "");
    let mut client = rig.client();
    for size in [1000, 64 * MIB, 5000, 30 * MIB, 64 * MIB] {
        client.fetch(&format!("/{size}"), &bytes[..size]);
    }
    let work = rig.settled(2);
    assert!(work.begun >= 2 && work.broken == 0, "{work:?}");
    assert!(work.bytes > 64 * MIB as u64, "{work:?}");

    // Several clients at once, some of which close in the middle.
    std::thread::scope(|scope| {
        let (rig, bytes) = (&rig, &bytes);
        for _ in 0..4 {
            scope.spawn(move || rig.client().fetch("/33554432", &bytes[..32 * MIB]));
        }
        for _ in 0..3 {
            let mut gone = rig.client();
            gone.ask("/67108864", "");
            gone.0.read_exact(&mut vec![0; 3 * MIB]).unwrap();
        }
    });
    // The client detects that a cut response is incomplete.
    let mut client = rig.client();
    client.ask("/cut67108864", "");
    let (status, length) = client.head().unwrap();
    assert_eq!((status, length), (200, 64 * MIB));
    let mut body = Vec::new();
    let _ = client.0.read_to_end(&mut body);
    assert!(body.len() <= 32 * MIB && body[..] == bytes[..body.len()]);
    // The proxy continues to serve.
    let mut client: Client = rig.client();
    client
        .0
        .get_ref()
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    client.fetch("/67108864", &bytes[..64 * MIB]);
    rig.settled(work.begun + 1);
}
