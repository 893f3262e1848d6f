// SPDX-License-Identifier: Apache-2.0
//! Unmodified web servers from Debian under all kinds of requests.

use std::io::Read;

use crate::rig::{MIB, NGINX, Rig, Server};

const LIGHTTPD: Server = Server {
    name: "lighttpd",
    port: 81,
    config: "server.document-root = \"/tmp/d\"
server.port = 81
server.max-keep-alive-requests = 10000
server.max-keep-alive-idle = 60
server.errorlog = \"/tmp/n/lighttpd.log\"
server.pid-file = \"/tmp/n/lighttpd.pid\"
",
    start: "lighttpd -f /tmp/n/lighttpd.conf",
};

const APACHE: Server = Server {
    name: "apache",
    port: 82,
    config: "ServerRoot /tmp/n
ServerName web
PidFile /tmp/n/apache.pid
ErrorLog /tmp/n/apache.log
LoadModule mpm_event_module /usr/lib/apache2/modules/mod_mpm_event.so
LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so
DefaultRuntimeDir /tmp/n
Listen 82
User nobody
Group nogroup
StartServers 1
MaxKeepAliveRequests 0
KeepAliveTimeout 60
EnableSendfile On
DocumentRoot /tmp/d
<Directory /tmp/d>
Require all granted
</Directory>
",
    start: "apache2 -f /tmp/n/apache.conf",
};

/// Sends each kind of request to a running web server.
fn serves(rig: &Rig, server: &Server) {
    let name = server.name;
    let before = rig.quiet();
    let [small, large] = &rig.files[..] else {
        unreachable!()
    };
    let mut client = rig.client_of(server.port);
    for _ in 0..4 {
        client.fetch("/f0", small);
        client.fetch("/f1", large);
    }
    let work = rig.settled(before.begun + 4);
    let sent = work.bytes - before.bytes;
    assert!(
        sent > (4 * 38 * MIB) as u64,
        "{name}: the host has sent {sent}"
    );
    assert_eq!(work.begun, before.begun + 4, "{name}: {work:?}");
    assert_eq!(
        (work.refused, work.broken),
        (0, before.broken),
        "{name}: {work:?}"
    );

    // A range, a HEAD request, and a file that does not exist.
    client.ask("/f1", "Range: bytes=1000000-29999999\r\n");
    let (status, body) = client.answer();
    assert_eq!(status, 206);
    assert!(body == large[1_000_000..30_000_000]);
    client.request("HEAD", "/f1", "").unwrap();
    assert_eq!(client.head().unwrap(), (200, large.len()));
    client.ask("/none", "");
    assert_eq!(client.answer().0, 404);
    let part = rig.settled(work.begun + 1);
    assert_eq!(part.begun, work.begun + 1, "{name}: {part:?}");
    assert!(part.bytes - work.bytes > 28_000_000, "{name}: {part:?}");

    // The server answers pipelined requests one after the other. The VM sends a response itself if much of the previous one is
    // still unsent.
    for path in ["/f1", "/f0", "/f1"] {
        client.ask(path, "");
    }
    for file in [large, small, large] {
        let (status, body) = client.answer();
        assert!(status == 200 && body == **file);
    }
    let pipelined = rig.settled(part.begun + 1);
    assert_eq!(pipelined.broken, before.broken, "{name}: {pipelined:?}");

    // Clients that close in the middle, and a concurrent one that does not.
    std::thread::scope(|scope| {
        let rig = &rig;
        let beside = scope.spawn(move || {
            for _ in 0..3 {
                rig.client_of(server.port).fetch("/f1", large);
            }
        });
        for _ in 0..6 {
            let mut gone = rig.client_of(server.port);
            gone.ask("/f1", "");
            gone.0.read_exact(&mut vec![0; MIB]).unwrap();
        }
        beside.join().unwrap();
    });
    client.fetch("/f1", large);
    rig.client_of(server.port).fetch("/f1", large);
    let last = rig.settled(pipelined.begun + 10);
    assert!(last.broken <= before.broken + 6, "{name}: {last:?}");
    assert_eq!(last.refused, 0, "{name}: {last:?}");
}

#[test]
fn nginx_lighttpd_and_apache() {
    let rig = Rig::boot("pi-web");
    for server in [NGINX, LIGHTTPD, APACHE] {
        rig.web.start(&server, "");
        serves(&rig, &server);
    }
}
