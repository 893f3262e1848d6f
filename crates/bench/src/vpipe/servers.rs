// SPDX-License-Identifier: Apache-2.0
//! What runs in the guest: programs for each row of paper 003's table 1, each as it is and with the library.

use super::Side;

/// A kind of work: a row of the table, or one of two web servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Work {
    /// A file down a connection, by Debian's nginx.
    Nginx,
    /// The same, where as it is it reads the file and writes it to the connection (paper 003, figure 4).
    Written,
    /// The same, by Debian's lighttpd.
    Lighttpd,
    /// Small files of nginx, while a large one is sent.
    Beside,
    /// A connection into another one: Debian's haproxy before a web server of another machine.
    Proxy,
    /// A connection into a file: the library's example of a server that receives files.
    Upload,
    /// A file into a file: Debian's cp, and a flush to the disk.
    Backup,
    /// As `Nginx`, with files of any size given away.
    Given,
    /// As `Nginx`, asked by wrk.
    Wrk,
    /// As `Nginx`, asked by curl.
    Curl,
    /// A file down a connection by `vpipe_file(3)`, of any size, and when.
    Times,
    /// The same without a guest.
    Native,
    /// As `Lighttpd`, without a guest.
    NativeWeb,
}

/// Where the server behind the proxy listens.
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

/// The library, for a program of the guest.
const PRELOAD: &str = "LD_PRELOAD=/usr/lib/libvpipe_preload.so";
/// Where the agent listens.
pub const SOCKET: &str = "/tmp/pipe.sock";

impl Work {
    /// Whether it has no guest.
    pub fn is_native(self) -> bool {
        matches!(self, Self::Native | Self::NativeWeb)
    }

    /// Those that have servers of their own.
    pub const SERVERS: [Self; 7] = [
        Self::Nginx,
        Self::Written,
        Self::Lighttpd,
        Self::Proxy,
        Self::Upload,
        Self::Given,
        Self::Times,
    ];

    /// As it is called in results.
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

    /// Port of a side.
    pub fn port(self, side: Side) -> u16 {
        let first = match self {
            // as it is it needs no second server
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

    /// Starts the server of one side in the guest; `host` is where the proxy finds other machines; without the library in a `control`. Nothing for what is no server.
    pub fn start(self, side: Side, host: &str, control: bool) -> Option<String> {
        let (name, port) = (self.name(), self.port(side));
        let run = format!("/tmp/{name}-{port}");
        let library = match (self, side) {
            (Self::Upload, Side::Viola) => format!("VIOLA_PIPE_SOCKET={SOCKET}"),
            (Self::Times, Side::Viola) => format!("VIOLA_PIPE_MIN=1 VIOLA_PIPE_SOCKET={SOCKET}"),
            // without the agent they move bytes by themselves
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

    /// Where files of a side are put.
    pub fn folder(self, side: Side) -> String {
        format!("/mnt/{}-{}", self.name(), side.name())
    }

    /// Copies a file and flushes it, so often; the last copy is compared.
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
