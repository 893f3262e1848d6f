// SPDX-License-Identifier: Apache-2.0
//! Applications on HDFS, all unmodified: TestDFSIO, HBase, Spark; and the hybrid setup with two DataNodes.

use std::path::Path;
use std::time::{Duration, Instant};

use viola_lab::hadoop::{JavaStack, Options, ROOT, RequestStats, TOOLS_LOG};

use super::FOLDER;
use super::bed::{CLIENT, MOUNT, NODE, OTHER_NODE, OWN_BLOCKS, TestBed, guest, sh};
use super::work::{
    BLOCK, DFSIO, DFSIO_RESULT, EVALUATION, LOCAL_FILE, Phase, REMOTE_FILE, Side, Sizes, TABLE,
    USERS, Work,
};
use crate::harness::side::lab_failure;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;

/// Sides of all application works.
const SIDES: [Side; 2] = [Side::Stock, Side::Viola];
/// Timeout for HBase's master to start.
const MASTER_TIMEOUT: Duration = Duration::from_secs(240);
/// HBase settings: small caches, so that reads reach HDFS.
const HBASE: [(&str, &str); 2] = [
    ("hfile.block.cache.size", "0.02"),
    ("hbase.regionserver.handler.count", "4"),
];

impl<'a> TestBed<'a> {
    /// Starts the programs of a phase and writes their input. Nothing here is measured.
    pub fn begin(&mut self, phase: Phase, works: &[Work], sizes: &Sizes) -> Outcome {
        match phase {
            Phase::Plain if works.contains(&Work::Dfsio) || works.contains(&Work::DfsioCold) => {
                self.write_dfsio(sizes)?;
            }
            Phase::Plain | Phase::Device => return Ok(()),
            Phase::HBase => self.begin_hbase(sizes)?,
            Phase::Spark => self.begin_spark(sizes)?,
            Phase::Hybrid => self.begin_hybrid(sizes)?,
        }
        self.run_agent(true)?;
        self.wait_named()?;
        // Start everything slow now, on each side.
        for side in SIDES {
            for work in works.iter().filter(|w| w.is_app()) {
                self.run(*work, side, sizes, 0)?;
            }
        }
        Ok(())
    }

    /// Ends the programs that [`TestBed::begin`] started.
    pub fn end(&mut self, phase: Phase) -> Outcome {
        if matches!(phase, Phase::HBase | Phase::Spark) {
            self.apps.clear();
            let script = "for f in /run/hbase-*.pid /run/bench71??.pid; do [ -e $f ] || continue; kill -9 $(cat $f); rm $f; done";
            sh(guest(self.lab, CLIENT)?, script)?;
        }
        Ok(())
    }

    /// Runs the work. The reply holds the tool's own figures.
    pub fn run(
        &mut self,
        work: Work,
        side: Side,
        sizes: &Sizes,
        seed: usize,
    ) -> Outcome<RequestStats> {
        let request = work.request(side, sizes, seed);
        match work {
            Work::DfsioCold | Work::Dfsio => {
                self.empty(DFSIO_RESULT)?;
                let answer = self.ask(side, &request)?;
                dfsio(answer, &self.read(DFSIO_RESULT)?)
            }
            Work::HBase(what) => {
                self.empty(TOOLS_LOG)?;
                let answer = self.ask(side, &format!("{}-{request}", "hbase"))?;
                let rows = what.rows(sizes.rows);
                evaluation(answer, &self.read(TOOLS_LOG)?, rows)
            }
            Work::Spark => self.ask(side, &format!("spark-{request}")),
            Work::Hybrid | Work::HybridNeighbours => {
                let near = self.ask(side, &request)?;
                let far = self.ask(side, &request.replacen(LOCAL_FILE, REMOTE_FILE, 1))?;
                Ok(RequestStats {
                    bytes: near.bytes + far.bytes,
                    reads: near.reads + far.reads,
                    local: near.local + far.local,
                    wall_s: near.wall_s + far.wall_s,
                    ..near
                })
            }
            _ => self.ask(side, &request),
        }
    }

    fn write_dfsio(&mut self, sizes: &Sizes) -> Outcome {
        let (files, mib) = sizes.dfsio;
        let request = format!(
            "stock tool {DFSIO} -write -nrFiles {files} -size {mib}MB -bufferSize {} -resFile {DFSIO_RESULT}",
            1 << 20
        );
        self.ask(Side::Stock, &request).map(drop)
    }

    /// Starts an HBase per side, with a table in one file.
    fn begin_hbase(&mut self, sizes: &Sizes) -> Outcome {
        for (index, side) in SIDES.into_iter().enumerate() {
            let word = format!("hbase-{}", side.word());
            let port = 2181 + index as u16;
            let keys = side.keys(MOUNT, OWN_BLOCKS);
            let keys = keys.iter().filter_map(|pair| pair.split_once('='));
            let keys = keys.chain(HBASE).map(|(k, v)| (k, v.to_owned())).collect();
            let client = guest(self.lab, CLIENT)?;
            self.hdfs
                .hbase(client, &word, port, &keys)
                .map_err(lab_failure)?;
            let mut app = self
                .hdfs
                .client_with(self.lab, client, JavaStack::HBase, 7171 + index as u16)
                .map_err(lab_failure)?;
            app.ask(&format!(
                "open {word} resource=hbase-default.xml hbase.zookeeper.quorum=127.0.0.1 \
                 hbase.zookeeper.property.clientPort={port}"
            ))
            .map_err(lab_failure)?;
            let started = Instant::now();
            while let Err(e) = app.ask(&format!("{word} tool org.viola.lab.HBaseTable ready")) {
                interrupt::check()?;
                if started.elapsed() > MASTER_TIMEOUT {
                    return Err(self.hbase_failure(&word, 7171 + index, &e));
                }
                std::thread::sleep(Duration::from_secs(1));
            }
            for request in [
                format!(
                    "{word} tool {EVALUATION} --nomapred --rows={} sequentialWrite 1",
                    sizes.rows
                ),
                format!("{word} tool org.viola.lab.HBaseTable compact TestTable"),
            ] {
                app.ask(&request)
                    .map_err(|e| self.hbase_failure(&word, 7171 + index, &e))?;
            }
            self.apps.insert(word, app);
        }
        Ok(())
    }

    /// Error of a start, with the end of the logs; both logs are kept beside the images.
    fn hbase_failure(&self, word: &str, port: usize, error: &viola_lab::Error) -> Failure {
        let mut text = error.full();
        for name in [word.to_owned(), format!("bench{port}")] {
            let kept = Path::new(FOLDER).join(format!("{name}.log"));
            let log_text = guest(self.lab, CLIENT)
                .and_then(|client| sh(client, &format!("tail -c 400000 /run/{name}.log")));
            match log_text
                .and_then(|log_text| std::fs::write(&kept, log_text).map_err(Failure::run))
            {
                Ok(()) => text.push_str(&format!("; see {}", kept.display())),
                Err(_) => text.push_str(&format!("; {name}.log could not be kept")),
            }
        }
        Failure::run(text)
    }

    fn begin_spark(&mut self, sizes: &Sizes) -> Outcome {
        for (index, side) in SIDES.into_iter().enumerate() {
            let word = format!("spark-{}", side.word());
            let client = guest(self.lab, CLIENT)?;
            let mut app = self
                .hdfs
                .client_with(self.lab, client, JavaStack::Spark, 7181 + index as u16)
                .map_err(lab_failure)?;
            app.ask(&format!(
                "open {word} {}",
                side.keys(MOUNT, OWN_BLOCKS).join(" ")
            ))
            .map_err(lab_failure)?;
            if side == Side::Stock {
                app.ask(&format!("{word} tool {USERS} make {TABLE} {}", sizes.users))
                    .map_err(lab_failure)?;
            }
            self.apps.insert(word, app);
        }
        Ok(())
    }

    /// Starts a second DataNode and writes a file to each.
    fn begin_hybrid(&mut self, sizes: &Sizes) -> Outcome {
        let other = guest(self.lab, OTHER_NODE)?;
        self.hdfs
            .join(other, &Options::default())
            .map_err(lab_failure)?;
        for (file, name) in [(LOCAL_FILE, NODE), (REMOTE_FILE, OTHER_NODE)] {
            let address = guest(self.lab, name)?.address();
            let address =
                address.ok_or_else(|| Failure::run(format!("{name} has no network address")))?;
            let size = sizes.file / 2;
            let request = format!("stock place {file} {size} {BLOCK} 1 {address}:9866");
            self.ask(Side::Stock, &request)?;
        }
        Ok(())
    }

    /// Truncates a file in the client's guest.
    fn empty(&self, path: &str) -> Outcome {
        sh(guest(self.lab, CLIENT)?, &format!(": > {ROOT}{path}")).map(drop)
    }

    fn read(&self, path: &str) -> Outcome<String> {
        sh(guest(self.lab, CLIENT)?, &format!("cat {ROOT}{path}"))
    }
}

/// Parses TestDFSIO's report of its reads, which excludes the start of the job.
fn dfsio(answer: RequestStats, text: &str) -> Outcome<RequestStats> {
    let of = |name: &str| -> Option<f64> {
        let line = text.lines().rev().find(|line| line.contains(name))?;
        line.rsplit(':').next()?.trim().parse().ok()
    };
    let (Some(mib), Some(rate)) = (
        of("Total MBytes processed"),
        of("Throughput mb/sec").filter(|rate| *rate > 0.0),
    ) else {
        return Err(Failure::run(format!(
            "cannot find a throughput in TestDFSIO's output: {}",
            text.trim()
        )));
    };
    Ok(RequestStats {
        bytes: (mib * f64::from(1 << 20)) as u64,
        wall_s: mib / rate,
        ..answer
    })
}

/// Parses PerformanceEvaluation's report of its rows, which excludes the connection.
fn evaluation(answer: RequestStats, text: &str, rows: u32) -> Outcome<RequestStats> {
    let line = text
        .lines()
        .rev()
        .find(|line| line.contains("Summary of timings (ms)"));
    let ms: Option<f64> = line
        .and_then(|line| line.rsplit('[').next())
        .and_then(|list| list.trim_end().trim_end_matches(']').parse().ok());
    let ms = ms.filter(|ms| *ms > 0.0).ok_or_else(|| {
        Failure::run(format!(
            "cannot find timings in PerformanceEvaluation's output: {}",
            text.trim()
        ))
    })?;
    Ok(RequestStats {
        bytes: u64::from(rows) * 1000,
        reads: u64::from(rows),
        wall_s: ms / 1e3,
        ..answer
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_result_of_testdfsio_counts() {
        let text = "----- TestDFSIO ----- : read\n Total MBytes processed: 64\n      Throughput mb/sec: 435.37\n\
                    ----- TestDFSIO ----- : read\n Total MBytes processed: 128\n      Throughput mb/sec: 256\n";
        let answer = dfsio(RequestStats::default(), text).unwrap();
        assert_eq!((answer.bytes, answer.wall_s), (128 << 20, 0.5));
        assert!(dfsio(RequestStats::default(), "").is_err());
    }

    #[test]
    fn the_timings_of_performanceevaluation_are_found() {
        let text = "Finished class X in 3900ms at offset 0 for 40000 rows (1.01 MB/s)\n\
                    [RandomReadTest] Summary of timings (ms): [3900]\nother\n";
        let answer = evaluation(RequestStats::default(), text, 2000).unwrap();
        assert_eq!((answer.reads, answer.wall_s), (2000, 3.9));
        assert!(evaluation(RequestStats::default(), "nothing", 1).is_err());
    }
}
