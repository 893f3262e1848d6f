// SPDX-License-Identifier: Apache-2.0
//! A web application and its database in the guest: an event calendar like Apache Olio (paper 002, table 2), with
//! nginx, PHP and MariaDB. wrk loads it with that table's mix of operations.
//!
//! Olio itself is unmaintained and needs an old PHP. Unlike in the paper, all parts run in one guest, and there are no
//! pictures.

use std::fmt::Write;
use std::fs;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use viola_lab::load::Http;
use viola_lab::{Guest, Lab};

use crate::harness::guests::shell;
use crate::harness::side::lab_failure;
use crate::harness::tool;
use viola_cli::error::{Failure, Outcome};

const SCHEMA: &str = include_str!("schema.sql");
const SITE: &str = include_str!("site.php");
const MIX: &str = include_str!("mix.lua");
const PORT: u16 = 8080;
const PERSONS: u32 = 200;
const EVENTS: u32 = 1000;
const TAGS: u32 = 50;
/// Size of the disk, MiB.
const DISK: u32 = 192;
/// Concurrent requests.
const CONNECTIONS: u32 = 16;
/// Timeout for the servers' first reply, with a busy guest.
const READY_TIMEOUT: Duration = Duration::from_secs(60);

/// Settings of the database files, which must match at run time; they are small because the guest is.
const DATABASE: [&str; 5] = [
    "--no-defaults",
    "--innodb-log-file-size=4M",
    "--innodb-data-file-path=ibdata1:8M:autoextend",
    "--innodb-undo-tablespaces=0",
    "--skip-log-bin",
];

/// Script in the guest that mounts the disk and starts the three servers. Each transaction is flushed to disk.
const SERVERS: &str = r#"set -e
d=/run/calendar
mkdir -p $d/disk $d/tmp
mount -o noatime DISK $d/disk
cat >$d/php.ini <<'END'
extension=mysqlnd
extension=pdo
extension=pdo_mysql
END
cat >$d/php.conf <<'END'
[global]
error_log = /run/calendar/php.log
[www]
user = nobody
group = nogroup
listen = /run/calendar/php
listen.mode = 0666
pm = static
pm.max_children = 4
END
cat >$d/nginx.conf <<'END'
user nobody nogroup;
worker_processes 1;
pid /run/calendar/nginx.pid;
error_log /run/calendar/nginx.log;
events {}
http {
  access_log off;
  client_body_temp_path /run/calendar/tmp/1;
  fastcgi_temp_path /run/calendar/tmp/2;
  proxy_temp_path /run/calendar/tmp/3;
  scgi_temp_path /run/calendar/tmp/4;
  uwsgi_temp_path /run/calendar/tmp/5;
  server {
    listen PORT;
    location / {
      fastcgi_pass unix:/run/calendar/php;
      fastcgi_param SCRIPT_FILENAME /run/calendar/disk/site.php;
      fastcgi_param REQUEST_METHOD $request_method;
      fastcgi_param REQUEST_URI $request_uri;
      fastcgi_param QUERY_STRING $query_string;
      fastcgi_param SERVER_PROTOCOL $server_protocol;
    }
  }
}
END
mariadbd DATABASE --user=root --datadir=$d/disk/data --socket=$d/socket --pid-file=$d/pid --skip-networking \
  --skip-grant-tables --skip-name-resolve --performance-schema=OFF --innodb-buffer-pool-size=24M \
  --innodb-use-native-aio=0 --key-buffer-size=1M --aria-pagecache-buffer-size=4M --max-connections=20 </dev/null >$d/log 2>&1 &
php-fpm8.4 -y $d/php.conf -c $d/php.ini </dev/null >$d/php.start 2>&1
nginx -c $d/nginx.conf -e $d/nginx.log </dev/null >$d/nginx.start 2>&1
"#;

/// One URL per operation.
const OPERATION_PATHS: [&str; 7] = [
    "/",
    "/login?n=1",
    "/tag?n=tag1",
    "/event?n=1",
    "/person?n=1",
    "/add_person?n=1",
    "/add_event?n=1",
];

/// Result of a load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ResponseTimes {
    /// Requests per second.
    pub rate: f64,
    /// Median response time, ms.
    pub p50: f64,
    /// 99th percentile of the response time, ms.
    pub p99: f64,
}

/// Creates the disk image: a file system with the database and the site.
///
/// # Errors
/// No space is left, mkfs.ext4 is missing, or the database rejects its data.
pub fn disk(path: &Path, image: &Path) -> Outcome {
    let failed = |e: std::io::Error| Failure::run(format!("{}: {e}", path.display()));
    let tree = path.with_extension("tree");
    let data = tree.join("data");
    fs::create_dir_all(&data).map_err(failed)?;
    fs::write(tree.join("site.php"), SITE).map_err(failed)?;
    let share = image.join("root/usr/share/mariadb");
    let mut sql = "create database mysql;\nuse mysql;\n".to_owned();
    for name in [
        "mariadb_system_tables",
        "mariadb_performance_tables",
        "mariadb_system_tables_data",
    ] {
        let file = share.join(name).with_extension("sql");
        let text = fs::read_to_string(&file);
        sql += &text.map_err(|e| Failure::run(format!("{}: {e}", file.display())))?;
    }
    sql += "create database calendar;\nuse calendar;\n";
    sql += SCHEMA;
    sql += &rows();
    run_with_input(
        tool::image_program(image, "sbin/mariadbd")
            .args(DATABASE)
            .args(["--bootstrap", "--user=root"])
            .arg(format!("--datadir={}", data.display()))
            .arg(format!("--lc-messages-dir={}", share.display()))
            .arg(format!(
                "--character-sets-dir={}",
                share.join("charsets").display()
            )),
        &sql,
    )?;
    let created = tool::output(
        Command::new("/usr/sbin/mkfs.ext4")
            .args(["-q", "-b", "4096", "-d"])
            .args([tree.as_path(), path])
            .arg(format!("{DISK}M")),
    );
    fs::remove_dir_all(&tree).map_err(failed)?;
    created.map(drop)
}

/// Runs a program to its end with `text` on standard input.
fn run_with_input(command: &mut Command, text: &str) -> Outcome {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| Failure::run(format!("mariadbd: {e}: run scripts/lab-image.sh")))?;
    if let Some(mut input) = child.stdin.take() {
        // A program that ends early reports why.
        let text = text.to_owned();
        std::thread::spawn(move || input.write_all(text.as_bytes()));
    }
    let output = child.wait_with_output().map_err(Failure::run)?;
    if output.status.success() {
        return Ok(());
    }
    let output_text = String::from_utf8_lossy(&output.stderr);
    let why = output_text.lines().find(|line| line.contains("ERROR"));
    Err(Failure::run(format!(
        "mariadbd: {}",
        why.unwrap_or("it failed")
    )))
}

/// SQL statements for persons, and for events with two tags, five attendees and two comments each.
fn rows() -> String {
    let mut sql = String::new();
    let mut insert = |table: &str, rows: Vec<String>| {
        for some in rows.chunks(40) {
            // The database accepts at most 60,000 bytes per statement here.
            // Writing to a String cannot fail.
            let _ = writeln!(sql, "INSERT INTO {table} VALUES {};", some.join(", "));
        }
    };
    let words = |n: u32, of: u32| format!("word{n} ").repeat(of as usize);
    let persons = (1..=PERSONS).map(|n| {
        format!(
            "({n}, 'person {n}', SHA2('secret {n}', 256), '{}')",
            words(n, 40)
        )
    });
    insert("persons", persons.collect());
    let events = (1..=EVENTS).map(|n| {
        let (day, owner) = (n % 365, 1 + n % PERSONS);
        format!(
            "({n}, 'event {n}', '{}', DATE '2026-01-01' + INTERVAL {day} DAY, {owner})",
            words(n, 100)
        )
    });
    insert("events", events.collect());
    let each = |of: u32| (1..=EVENTS).flat_map(move |n| (0..of).map(move |k| (n, k)));
    let tags = each(2).map(|(n, k)| format!("({n}, 'tag{}')", (n + 7 * k) % TAGS));
    insert("tags", tags.collect());
    let attendees = each(5).map(|(n, k)| format!("({n}, {})", 1 + (n + 31 * k) % PERSONS));
    insert("attendees", attendees.collect());
    let comments = each(2).map(|(n, k)| {
        let person = 1 + (3 * n + k) % PERSONS;
        format!("({}, {n}, {person}, '{}')", 2 * n + k, words(n, 20))
    });
    insert("comments", comments.collect());
    sql
}

/// The servers in the guest, and their load generator.
pub struct Calendar {
    address: Ipv4Addr,
    /// Script of wrk.
    script: PathBuf,
}

impl Calendar {
    /// Starts the servers on the guest's `device` and runs each operation once.
    ///
    /// # Errors
    /// A server does not start or does not reply.
    pub fn start(
        lab: &Lab,
        guest: &Guest,
        address: Ipv4Addr,
        device: &str,
        folder: &Path,
    ) -> Outcome<Self> {
        let script = SERVERS
            .replace("DISK", device)
            .replace("PORT", &PORT.to_string())
            .replace("DATABASE", &DATABASE.join(" "));
        shell(guest, &script)?;
        let calendar = Self {
            address,
            script: folder.join("mix.lua"),
        };
        let started = Instant::now();
        for path in OPERATION_PATHS {
            while let Err(failure) = calendar.ask(lab, path) {
                if started.elapsed() > READY_TIMEOUT {
                    let logs = "cd /run/calendar; tail -n 3 log php.log php.start nginx.log 2>&1";
                    let output_text = shell(guest, logs)?.stdout;
                    let name = guest.name();
                    let (Failure::Usage(why) | Failure::Run(why)) = failure;
                    let output_text = output_text.trim();
                    return Err(Failure::run(format!(
                        "{why}; in guest {name}: {output_text}"
                    )));
                }
                std::thread::sleep(Duration::from_millis(200));
            }
        }
        Ok(calendar)
    }

    /// A request for the page of a tag, the most frequent operation, one at a time.
    ///
    /// # Errors
    /// The page cannot be loaded.
    pub fn page(&self, lab: &Lab) -> Outcome<Http> {
        let path = "/tag?n=tag1";
        Ok(Http {
            port: PORT,
            path: path.into(),
            bytes: self.ask(lab, path)?,
            keep_alive: true,
            ..Http::default()
        })
    }

    /// Loads a page, and returns its length in bytes.
    fn ask(&self, lab: &Lab, path: &str) -> Outcome<usize> {
        let url = format!("http://{}:{PORT}{path}", self.address);
        let reply = lab.in_netns(|| {
            tool::output(
                Command::new("curl")
                    .args(["--silent", "--show-error", "--fail", "--max-time", "20"])
                    .arg(url),
            )
        });
        let page = reply.map_err(lab_failure)??.stdout;
        match page.ends_with(b"</html>\n") {
            true => Ok(page.len()),
            false => Err(Failure::run(format!(
                "the calendar's page {path} is incomplete"
            ))),
        }
    }

    /// Loads the site for this long (whole seconds, at least 1).
    ///
    /// # Errors
    /// A reply fails or is incomplete.
    pub fn measure(&self, lab: &Lab, time: Duration, seed: u64) -> Outcome<ResponseTimes> {
        let script = MIX
            .replace("SEED", &seed.to_string())
            .replace("PERSONS", &PERSONS.to_string())
            .replace("EVENTS", &EVENTS.to_string());
        let failed = |e: std::io::Error| Failure::run(format!("{}: {e}", self.script.display()));
        fs::write(&self.script, script).map_err(failed)?;
        let output = lab.in_netns(|| {
            tool::output(
                Command::new("wrk")
                    .args(["-t1", &format!("-c{CONNECTIONS}"), "--timeout", "30s"])
                    .arg(format!("-d{}s", time.as_secs().max(1)))
                    .arg("-s")
                    .arg(&self.script)
                    .arg(format!("http://{}:{PORT}/", self.address)),
            )
        });
        let output = output.map_err(lab_failure)??;
        let text = String::from_utf8_lossy(&output.stdout);
        parse_counts(&text).map_err(|why| Failure::run(format!("wrk, calendar: {why}")))
    }
}

/// Parses the script's output: microseconds, requests, failures, and two quantiles in microseconds.
fn parse_counts(text: &str) -> Result<ResponseTimes, String> {
    let line = text.lines().find_map(|line| line.strip_prefix("counted "));
    let numbers: Option<Vec<u64>> = line.and_then(|line| {
        let words = line.split_ascii_whitespace();
        words.map(|word| word.parse().ok()).collect()
    });
    match numbers.as_deref() {
        Some(&[us, requests, 0, p50, p99]) if us > 0 && requests > 0 => Ok(ResponseTimes {
            rate: requests as f64 * 1e6 / us as f64,
            p50: p50 as f64 / 1e3,
            p99: p99 as f64 / 1e3,
        }),
        Some(&[_, requests, failures, ..]) if failures > 0 => {
            Err(format!("{failures} of {requests} replies failed"))
        }
        _ => Err(format!("cannot parse wrk's output: {}", text.trim())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrk_results_with_failures_are_rejected() {
        let got = parse_counts("Running\ncounted 2000000 80 0 150000 400500\n").unwrap();
        assert_eq!((got.rate, got.p50, got.p99), (40.0, 150.0, 400.5));
        let why = parse_counts("counted 2000000 80 2 150000 400500\n").unwrap_err();
        assert_eq!(why, "2 of 80 replies failed");
        assert!(parse_counts("counted 2000000 0 0 0 0\n").is_err());
        assert!(parse_counts("Requests/sec: 12\n").is_err());
    }

    #[test]
    fn each_event_has_its_rows() {
        let sql = rows();
        let of = |table: &str| {
            let lines = sql.lines();
            let lines = lines.filter(|line| line.starts_with(&format!("INSERT INTO {table} ")));
            lines.map(|line| line.matches("), (").count() + 1).sum()
        };
        let found: [usize; 5] = ["persons", "events", "tags", "attendees", "comments"].map(of);
        assert_eq!(found, [200, 1000, 2000, 5000, 2000]);
        assert!(sql.lines().all(|line| line.ends_with(");")));
    }
}
