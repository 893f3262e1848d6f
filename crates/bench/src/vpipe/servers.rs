// SPDX-License-Identifier: Apache-2.0
//! Servers in the guest: programs for each row of paper 003's table 1, each without and with the library.

use super::Side;

/// A kind of work: a row of the table, or an additional web server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Work {
    /// A file to a connection, by Debian's nginx.
    Nginx,
    /// The same with read and write calls instead of sendfile (paper 003, figure 4).
    Written,
    /// As `Nginx`, by Debian's lighttpd.
    Lighttpd,
    /// Small files of nginx while it also sends a large one.
    Beside,
    /// A connection to another connection: Debian's haproxy in front of a web server on another host.
    Proxy,
    /// A connection to a file: the library's example upload server.
    Upload,
    /// A file to a file: Debian's cp, and a flush to the disk.
    Backup,
    /// As `Nginx`, with files of any size handed over.
    Given,
    /// As `Nginx`, with wrk as the client.
    Wrk,
    /// As `Nginx`, with curl as the client.
    Curl,
    /// A file to a connection by `vpipe_file(3)`, for any size, with timed hand-overs.
    Times,
    /// As `Times`, without a guest.
    Native,
    /// As `Lighttpd`, without a guest.
    NativeWeb,
}

/// Port of the server behind the proxy.
pub const BACKEND: u16 = 90;

const NGINX: &str = "user root root; worker_processes 1; pid RUN/pid; error_log RUN/error.log;
events { worker_connections 512; }
http {
  access_log off; sendfile SENDFILE; tcp_nopush on; keepalive_requests 100000000; default_type text/plain;
  client_body_temp_path RUN/1; proxy_temp_path RUN/2; fastcgi_temp_path RUN/3;
  uwsgi_temp_path RUN/4; scgi_temp_path RUN/5;
  server { listen PORT backlog=512; root /mnt; }
}
";

const LIGHTTPD: &str = "server.document-root = \"/mnt\"
server.port = PORT
server.max-keep-alive-requests = 65535
server.max-keep-alive-idle = 60
server.max-connections = 512
server.errorlog = \"RUN/error.log\"
server.pid-file = \"RUN/pid\"
";

const HAPROXY: &str = "global
  maxconn 512
defaults
  mode http
  option splice-response
  timeout connect 10s
  timeout client 60s
  timeout server 60s
listen web
  bind :PORT
  server one BACKEND
";

/// The library in the guest.
const PRELOAD: &str = "LD_PRELOAD=/usr/lib/libvpipe_preload.so";
/// Socket of the agent.
pub const SOCKET: &str = "/tmp/pipe.sock";

impl Work {
    /// Whether this work runs without a guest.
    pub fn is_native(self) -> bool {
        matches!(self, Self::Native | Self::NativeWeb)
    }

    /// The kinds of work with servers of their own.
    pub const SERVERS: [Self; 7] = [
        Self::Nginx,
        Self::Written,
        Self::Lighttpd,
        Self::Proxy,
        Self::Upload,
        Self::Given,
        Self::Times,
    ];

    /// Name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nginx | Self::Written | Self::Beside | Self::Given | Self::Wrk | Self::Curl => {
                "nginx"
            }
            Self::Lighttpd => "lighttpd",
            Self::Proxy => "haproxy",
            Self::Upload => "upload",
            Self::Backup => "cp",
            Self::Times => "vpipe_file",
            Self::Native => "vpipe_file natively",
            Self::NativeWeb => "lighttpd natively",
        }
    }

    /// Port of a side's server.
    pub fn port(self, side: Side) -> u16 {
        let first = match self {
            // The stock side uses the ordinary server at port 80.
            Self::Given if side == Side::Viola => 140,
            Self::Written if side == Side::Stock => 160,
            Self::Nginx | Self::Written | Self::Beside | Self::Given | Self::Wrk | Self::Curl => 80,
            Self::Lighttpd | Self::NativeWeb => 100,
            Self::Proxy => 110,
            Self::Upload => 120,
            Self::Backup => 130,
            Self::Times | Self::Native => 150,
        };
        first + side as u16
    }

    /// Script that starts a side's server in the guest. `host` is the address that the proxy forwards to. A `control`
    /// run never uses the library. Empty for work without a server.
    pub fn start(self, side: Side, host: &str, control: bool) -> Option<String> {
        let (name, port) = (self.name(), self.port(side));
        let run = format!("/tmp/{name}-{port}");
        let library = match (self, side) {
            (Self::Upload, Side::Viola) => format!("VIOLA_PIPE_SOCKET={SOCKET}"),
            (Self::Times, Side::Viola) => format!("VIOLA_PIPE_MIN=1 VIOLA_PIPE_SOCKET={SOCKET}"),
            // Without the agent the programs move the bytes themselves.
            (Self::Upload | Self::Times, _) => "VIOLA_PIPE_SOCKET=/tmp/none.sock".into(),
            (Self::Given, Side::Viola) => {
                format!("VIOLA_PIPE_MIN=1 {PRELOAD} VIOLA_PIPE_SOCKET={SOCKET}")
            }
            (_, Side::Viola) if !control => format!("{PRELOAD} VIOLA_PIPE_SOCKET={SOCKET}"),
            _ => String::new(),
        };
        let (config, command) = match self {
            Self::Given if side != Side::Viola => return None,
            Self::Written if side == Side::Viola => return None,
            Self::Nginx | Self::Written | Self::Given => {
                (NGINX, format!("nginx -c {run}/conf -e {run}/error.log"))
            }
            Self::Lighttpd => (LIGHTTPD, format!("lighttpd -f {run}/conf")),
            Self::Proxy => (HAPROXY, format!("haproxy -D -f {run}/conf")),
            Self::Upload => {
                let folder = self.folder(side);
                let command =
                    format!("mkdir -p {folder}; {library} vpipe-upload {folder} 0.0.0.0 {port}");
                return Some(format!("{command} > {folder}.log 2>&1 &"));
            }
            Self::Times => {
                let command = format!("{library} vpipe-times /mnt {port}");
                return Some(format!("{command} > {run}.log 2>&1 &"));
            }
            Self::Beside
            | Self::Backup
            | Self::Wrk
            | Self::Curl
            | Self::Native
            | Self::NativeWeb => return None,
        };
        let config = config
            .replace("RUN", &run)
            .replace("SENDFILE", if self == Self::Written { "off" } else { "on" })
            .replace("PORT", &port.to_string())
            .replace("BACKEND", &format!("{host}:{BACKEND}"));
        Some(format!(
            "mkdir -p {run}; cat > {run}/conf <<'END'\n{config}END\n{library} {command} > {run}/out 2>&1 || {{ cat {run}/out >&2; false; }}"
        ))
    }

    /// Folder for a side's files.
    pub fn folder(self, side: Side) -> String {
        format!("/mnt/{}-{}", self.name(), side.name())
    }

    /// Script that copies a file and flushes it, `times` times, and compares the last copy.
    pub fn copies(self, side: Side, path: &str, times: usize) -> String {
        let folder = self.folder(side);
        let library = match side {
            Side::Viola => format!("{PRELOAD} VIOLA_PIPE_SOCKET={SOCKET}"),
            _ => String::new(),
        };
        format!(
            "mkdir -p {folder}; n=0; while [ $n -lt {times} ]; do rm -f {folder}/*; \
             {library} /usr/bin/cp /mnt{path} {folder}/$n; sync -f {folder}/$n; n=$((n+1)); done"
        )
    }
}
