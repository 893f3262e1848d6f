// SPDX-License-Identifier: Apache-2.0
//! Works that are measured, and their sides.

/// Transport of the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// Stock HDFS, over TCP from guest to guest.
    Stock,
    /// Through the host.
    Viola,
    /// Through the host, without checksum verification.
    Unverified,
    /// The same reads from the client guest's own virtual disk, without checksum verification: the upper bound.
    Disk,
    /// Stock HDFS on the host itself.
    Loopback,
}

impl Side {
    /// All sides, in the order of tables.
    pub const ALL: [Self; 5] = [
        Self::Stock,
        Self::Viola,
        Self::Unverified,
        Self::Disk,
        Self::Loopback,
    ];

    /// Name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stock => "stock",
            Self::Viola => "viola",
            Self::Unverified => "viola, no CRC",
            Self::Disk => "own disk, no CRC",
            Self::Loopback => "host loopback",
        }
    }

    /// Name in requests to the benchmark client.
    pub fn word(self) -> &'static str {
        match self {
            Self::Stock | Self::Loopback => "stock",
            Self::Viola => "viola",
            Self::Unverified => "unverified",
            Self::Disk => "disk",
        }
    }

    /// Configuration keys that override `hdfs-site.xml`. `mount` is the folder in which the host shows blocks.
    pub fn keys(self, mount: &str, disk: &str) -> Vec<String> {
        let accessor = "dfs.client.replica.accessor.builder.classes=org.viola.hdfs.ViolaReplicaAccessorBuilder";
        let at = |folder: &str| format!("viola.vread.mount={folder}");
        let mut keys = match self {
            Self::Stock | Self::Loopback => return Vec::new(),
            Self::Viola => vec![accessor.into(), at(mount)],
            Self::Unverified => vec![accessor.into(), at(mount), "viola.verify=false".into()],
            Self::Disk => vec![accessor.into(), at(disk), "viola.verify=false".into()],
        };
        // A long deadline, so that reads on a busy machine do not fall back to TCP.
        keys.push("viola.vread.deadline=20s".into());
        keys
    }

    /// Whether viola must have served every byte.
    pub fn is_local(self) -> bool {
        !matches!(self, Self::Stock | Self::Loopback)
    }
}

/// One kind of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Work {
    /// The whole file in reads of 1 MiB, with cold caches.
    Cold,
    /// The same again, with warm caches.
    Warm,
    /// The whole file in reads of this many KiB, warm: the paper's delay.
    Delay(u32),
    /// Random reads of this many KiB, with a cold client cache.
    Random(u32),
    /// The same reads again.
    RandomAgain(u32),
    /// Reads of 1 MiB at random places while two guests load the DataNode's core.
    Neighbours,
    /// Writing a file.
    Write,
    /// Appending to a file.
    Append,
    /// Appending to a file whose blocks viola has named: HDFS first copies the last block.
    AppendNamed,
    /// Deleting small files.
    Delete,
    /// TestDFSIO's read, with cold caches.
    DfsioCold,
    /// The same again, with warm caches.
    Dfsio,
    /// HBase's PerformanceEvaluation.
    HBase(HBase),
    /// A range of a table with Spark SQL.
    Spark,
    /// Two files; viola does not serve the DataNode of the second.
    Hybrid,
    /// The same while two guests load the DataNodes' core.
    HybridNeighbours,
    /// As [`Work::Cold`], with a block device as the DataNode's disk.
    DeviceCold,
    /// As [`Work::Warm`], with a block device as the DataNode's disk.
    DeviceWarm,
    /// Random reads of 4 KiB from the same.
    DeviceRandom,
}

/// Test of PerformanceEvaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum HBase {
    /// All rows, in order.
    Scan,
    /// Single rows, in order.
    Sequential,
    /// Single rows, in random order.
    Random,
}

impl HBase {
    /// PerformanceEvaluation's arguments for a table of this many rows.
    pub fn arguments(self, rows: u32) -> String {
        match self {
            Self::Scan => format!("--nomapred --rows={rows} scan 1"),
            Self::Sequential => format!("--nomapred --rows={} sequentialRead 1", rows / 10),
            Self::Random => format!("--nomapred --rows={rows} --sampleRate=0.05 randomRead 1"),
        }
    }

    /// Number of rows that the test reads.
    pub fn rows(self, rows: u32) -> u32 {
        match self {
            Self::Scan => rows,
            Self::Sequential => rows / 10,
            Self::Random => rows / 20,
        }
    }
}

/// Works that share guests and programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// One HDFS client.
    Plain,
    /// An HBase for each side.
    HBase,
    /// A Spark for each side.
    Spark,
    /// A second DataNode.
    Hybrid,
    /// Guests whose DataNode has a block device as its disk.
    Device,
}

impl Phase {
    /// All phases, in order.
    pub const ALL: [Self; 5] = [
        Self::Plain,
        Self::HBase,
        Self::Spark,
        Self::Hybrid,
        Self::Device,
    ];
}

impl Work {
    /// All works, in the order of measurement.
    pub const ALL: [Self; 26] = [
        Self::Cold,
        Self::Warm,
        Self::Random(4),
        Self::Random(64),
        Self::RandomAgain(4),
        Self::RandomAgain(64),
        Self::Delay(64),
        Self::Delay(256),
        Self::Delay(1024),
        Self::Delay(4096),
        Self::Neighbours,
        Self::Write,
        Self::Append,
        Self::AppendNamed,
        Self::Delete,
        Self::DfsioCold,
        Self::Dfsio,
        Self::HBase(HBase::Scan),
        Self::HBase(HBase::Sequential),
        Self::HBase(HBase::Random),
        Self::Spark,
        Self::Hybrid,
        Self::HybridNeighbours,
        Self::DeviceCold,
        Self::DeviceWarm,
        Self::DeviceRandom,
    ];

    /// Name in tables.
    pub fn name(self) -> String {
        match self {
            Self::Cold => "sequential 1 MiB, cold".into(),
            Self::Warm => "sequential 1 MiB, again".into(),
            Self::Delay(kib) => format!("delay of a {} read", size(kib)),
            Self::Random(kib) => format!("random {}", size(kib)),
            Self::RandomAgain(kib) => format!("random {}, again", size(kib)),
            Self::Neighbours => "1 MiB read, two busy neighbours".into(),
            Self::Write => "write".into(),
            Self::Append => "append".into(),
            Self::AppendNamed => "append to a named block".into(),
            Self::Delete => "delete".into(),
            Self::DfsioCold => "TestDFSIO read, cold".into(),
            Self::Dfsio => "TestDFSIO read, again".into(),
            Self::HBase(HBase::Scan) => "HBase scan".into(),
            Self::HBase(HBase::Sequential) => "HBase sequential read".into(),
            Self::HBase(HBase::Random) => "HBase random read".into(),
            Self::Spark => "Spark SQL select".into(),
            Self::Hybrid => "hybrid read".into(),
            Self::HybridNeighbours => "hybrid read, two busy neighbours".into(),
            Self::DeviceCold => "block device, 1 MiB, cold".into(),
            Self::DeviceWarm => "block device, 1 MiB, again".into(),
            Self::DeviceRandom => "block device, random 4 KiB".into(),
        }
    }

    /// Phase of the work.
    pub fn phase(self) -> Phase {
        match self {
            Self::HBase(_) => Phase::HBase,
            Self::Spark => Phase::Spark,
            Self::Hybrid | Self::HybridNeighbours => Phase::Hybrid,
            Self::DeviceCold | Self::DeviceWarm | Self::DeviceRandom => Phase::Device,
            _ => Phase::Plain,
        }
    }

    /// Whether the work changes HDFS. The agent then runs only on viola's side.
    pub fn writes(self) -> bool {
        matches!(
            self,
            Self::Write | Self::Append | Self::AppendNamed | Self::Delete
        )
    }

    /// Whether an application does the work and reports its own time or is timed as a whole.
    pub fn is_app(self) -> bool {
        matches!(
            self,
            Self::DfsioCold | Self::Dfsio | Self::HBase(_) | Self::Spark
        )
    }

    /// Minimum part of the bytes that viola must serve on its side, 0 to 1. HBase and Spark read an
    /// unknown part from caches of their own.
    pub fn local_part(self) -> f64 {
        match self {
            Self::Hybrid | Self::HybridNeighbours => 0.5,
            Self::HBase(_) | Self::Spark => 0.01,
            _ => 1.0,
        }
    }

    /// Whether the work begins with cold caches.
    pub fn is_cold(self) -> bool {
        matches!(self, Self::Cold | Self::DfsioCold | Self::DeviceCold)
    }

    /// Whether two other guests are busy meanwhile.
    pub fn is_disturbed(self) -> bool {
        matches!(self, Self::Neighbours | Self::HybridNeighbours)
    }

    /// Sides of the work.
    pub fn sides(self) -> &'static [Side] {
        match self {
            Self::Cold | Self::Warm | Self::Random(_) | Self::RandomAgain(_) => &Side::ALL,
            _ => &[Side::Stock, Side::Viola],
        }
    }

    /// Approximate duration of one measurement with its preparation, seconds, on two cores.
    pub fn seconds(self, quick: bool) -> f64 {
        let full = match self {
            Self::Cold => 3.2,
            Self::Warm | Self::Delay(_) => 2.6,
            Self::Random(_) => 3.2,
            Self::RandomAgain(_) => 3.6,
            Self::Neighbours => 4.5,
            Self::Write => 9.0,
            Self::Append => 10.0,
            Self::AppendNamed => 20.0,
            Self::Delete => 18.0,
            Self::DfsioCold | Self::Dfsio => 4.0,
            Self::HBase(_) => 9.0,
            Self::Spark => 6.0,
            Self::Hybrid => 4.0,
            Self::HybridNeighbours => 8.0,
            Self::DeviceCold | Self::DeviceWarm | Self::DeviceRandom => 3.0,
        };
        match quick {
            true => full * 0.45,
            false => full,
        }
    }

    /// Request to the benchmark client. `seed` gives all sides of a round the same places.
    pub fn request(self, side: Side, sizes: &Sizes, seed: usize) -> String {
        let side = side.word();
        let scratch = sizes.scratch;
        match self {
            Self::Cold | Self::Warm | Self::DeviceCold | Self::DeviceWarm => {
                format!("{side} skim {FILE} {}", 1 << 20)
            }
            Self::Delay(kib) => format!("{side} skim {FILE} {}", kib << 10),
            Self::Random(kib) | Self::RandomAgain(kib) => {
                format!("{side} pread {FILE} {} {} {seed}", sizes.random, kib << 10)
            }
            Self::DeviceRandom => Self::Random(4).request_of(side, sizes, seed),
            Self::Neighbours => {
                format!("{side} pread {FILE} {} {} {seed}", sizes.disturbed, 1 << 20)
            }
            Self::Write => format!("{side} write {SCRATCH} {scratch} {BLOCK} {seed}"),
            Self::Append | Self::AppendNamed => {
                format!("{side} append {SCRATCH} {} {seed}", scratch / 8)
            }
            Self::Delete => format!("{side} clear {SMALL_FILES_FOLDER}"),
            Self::DfsioCold | Self::Dfsio => format!(
                "{side} tool {DFSIO} -read -nrFiles {} -size {}MB -bufferSize {} -resFile {DFSIO_RESULT}",
                sizes.dfsio.0,
                sizes.dfsio.1,
                1 << 20
            ),
            Self::HBase(what) => format!("{side} tool {EVALUATION} {}", what.arguments(sizes.rows)),
            Self::Spark => {
                let (from, to) = (sizes.users / 4, sizes.users / 2 - 1);
                let found = to - from + 1;
                format!("{side} tool {USERS} select {TABLE} {from} {to} {found}")
            }
            Self::Hybrid | Self::HybridNeighbours => {
                format!("{side} skim {LOCAL_FILE} {}", 1 << 20)
            }
        }
    }

    fn request_of(self, word: &str, sizes: &Sizes, seed: usize) -> String {
        let stock = self.request(Side::Stock, sizes, seed);
        stock.replacen(Side::Stock.word(), word, 1)
    }
}

/// File to read.
pub const FILE: &str = "/bench";
/// File to write and append to.
pub const SCRATCH: &str = "/scratch";
/// Folder of the files to delete.
pub const SMALL_FILES_FOLDER: &str = "/litter";
/// Number of these files.
pub const SMALL_FILES: u32 = 200;
/// File of the hybrid read on the DataNode that viola serves.
pub const LOCAL_FILE: &str = "/near";
/// File of the hybrid read on the other DataNode.
pub const REMOTE_FILE: &str = "/far";
/// Hadoop's own benchmark.
pub const DFSIO: &str = "org.apache.hadoop.fs.TestDFSIO";
/// TestDFSIO's result file, inside the root that Java runs in.
pub const DFSIO_RESULT: &str = "/tmp/dfsio.log";
/// HBase's own benchmark.
pub const EVALUATION: &str = "org.apache.hadoop.hbase.PerformanceEvaluation";
/// The lab's tool that reads a table of users with Spark.
pub const USERS: &str = "org.viola.lab.SparkTable";
/// That table.
pub const TABLE: &str = "/users";
/// HDFS's own block size.
pub const BLOCK: u64 = 128 << 20;

/// Amounts of data per work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Size of the file to read, bytes.
    pub file: u64,
    /// Bytes to write. The last block must stay partial, otherwise an append would begin a new block.
    pub scratch: u64,
    /// Number of random reads.
    pub random: u32,
    /// Number of reads beside busy neighbours.
    pub disturbed: u32,
    /// Number of TestDFSIO's files, and their size in MiB.
    pub dfsio: (u32, u32),
    /// Rows of the HBase table, 1000 bytes each.
    pub rows: u32,
    /// Rows of the user table, about 110 bytes each.
    pub users: u32,
    /// Warm-up time per side, seconds.
    pub warm_s: u32,
}

impl Sizes {
    /// Space on each disk, bytes.
    pub fn room(&self) -> u64 {
        let dfsio = u64::from(self.dfsio.0 * self.dfsio.1) << 20;
        // Written data also needs space for a log and for one rewrite when it is compacted.
        let tables = 4 * 2 * u64::from(self.rows) * 1024 + 2 * u64::from(self.users) * 128;
        2 * (2 * self.file + self.scratch + dfsio) + tables + (1 << 30)
    }

    /// Sizes of a full or a quick run.
    pub fn new(quick: bool) -> Self {
        match quick {
            false => Self {
                file: 512 << 20,
                scratch: 192 << 20,
                random: 2000,
                disturbed: 60,
                dfsio: (4, 64),
                rows: 60_000,
                users: 600_000,
                warm_s: 10,
            },
            true => Self {
                file: 128 << 20,
                scratch: 64 << 20,
                random: 300,
                disturbed: 20,
                dfsio: (2, 32),
                rows: 20_000,
                users: 200_000,
                warm_s: 3,
            },
        }
    }
}

fn size(kib: u32) -> String {
    match kib {
        kib if kib >= 1024 => format!("{} MiB", kib >> 10),
        kib => format!("{kib} KiB"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_those_of_the_benchmark_client() {
        let sizes = Sizes::new(true);
        assert_eq!(
            Work::Warm.request(Side::Viola, &sizes, 1),
            "viola skim /bench 1048576"
        );
        assert_eq!(
            Work::Random(4).request(Side::Unverified, &sizes, 7),
            "unverified pread /bench 300 4096 7"
        );
        assert_eq!(
            Work::Delay(64).request(Side::Loopback, &sizes, 7),
            "stock skim /bench 65536"
        );
        assert_eq!(
            Work::DeviceRandom.request(Side::Viola, &sizes, 7),
            "viola pread /bench 300 4096 7"
        );
        assert_eq!(
            Work::Spark.request(Side::Stock, &sizes, 7),
            "stock tool org.viola.lab.SparkTable select /users 50000 99999 50000"
        );
        assert_eq!(
            Work::Write.request(Side::Stock, &sizes, 2),
            "stock write /scratch 67108864 134217728 2"
        );
    }

    #[test]
    fn names_use_usual_units() {
        assert_eq!(Work::Delay(4096).name(), "delay of a 4 MiB read");
        assert_eq!(Work::Random(64).name(), "random 64 KiB");
        assert_eq!(Work::RandomAgain(4).name(), "random 4 KiB, again");
    }

    #[test]
    fn only_sides_past_the_datanode_name_the_plug_in() {
        for side in Side::ALL {
            let keys = side.keys("/vread", "/mnt/blocks");
            assert_eq!(
                side.is_local(),
                keys.iter()
                    .any(|k| k.contains("ViolaReplicaAccessorBuilder"))
            );
        }
        assert!(
            Side::Disk
                .keys("/vread", "/mnt/blocks")
                .contains(&"viola.vread.mount=/mnt/blocks".to_owned())
        );
    }
}
