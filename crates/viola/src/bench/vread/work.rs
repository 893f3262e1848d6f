// SPDX-License-Identifier: Apache-2.0
//! What is measured, and on which sides.

/// Who serves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// HDFS as it is, over TCP from guest to guest.
    Stock,
    /// Through the host.
    Viola,
    /// Through the host, checksums not verified.
    Unverified,
    /// The same reads of the client guest's own virtual disk, checksums not verified: the limit.
    Disk,
    /// HDFS as it is, on the host itself.
    Loopback,
}

impl Side {
    /// All, in the order of tables.
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

    /// What the benchmark client calls it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Stock | Self::Loopback => "stock",
            Self::Viola => "viola",
            Self::Unverified => "unverified",
            Self::Disk => "disk",
        }
    }

    /// Keys of its configuration over `hdfs-site.xml`; `mount` is where the host shows blocks.
    pub fn keys(self, mount: &str, disk: &str) -> Vec<String> {
        let accessor = "dfs.client.replica.accessor.builder.classes=org.viola.hdfs.ViolaReplicaAccessorBuilder";
        let at = |folder: &str| format!("viola.vread.mount={folder}");
        let mut keys = match self {
            Self::Stock | Self::Loopback => return Vec::new(),
            Self::Viola => vec![accessor.into(), at(mount)],
            Self::Unverified => vec![accessor.into(), at(mount), "viola.verify=false".into()],
            Self::Disk => vec![accessor.into(), at(disk), "viola.verify=false".into()],
        };
        // a busy machine must not send a side's reads to another's
        keys.push("viola.vread.deadline=20s".into());
        keys
    }

    /// Whether every byte must have come past the DataNode.
    pub fn is_local(self) -> bool {
        !matches!(self, Self::Stock | Self::Loopback)
    }
}

/// One kind of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Work {
    /// The whole file in reads of 1 MiB, nothing of it in any cache.
    Cold,
    /// The same again.
    Warm,
    /// The whole file in reads of this many KiB, again: the paper's delay.
    Delay(u32),
    /// Random reads of this many KiB.
    Random(u32),
    /// Reads of 1 MiB at random places while two guests are busy on the DataNode's core.
    Neighbours,
    /// Writing a file.
    Write,
    /// Appending to it.
    Append,
    /// Deleting it.
    Delete,
}

impl Work {
    /// All, in the order in which they are measured.
    pub const ALL: [Self; 12] = [
        Self::Cold,
        Self::Warm,
        Self::Random(4),
        Self::Random(64),
        Self::Delay(64),
        Self::Delay(256),
        Self::Delay(1024),
        Self::Delay(4096),
        Self::Neighbours,
        Self::Write,
        Self::Append,
        Self::Delete,
    ];

    /// Name in tables.
    pub fn name(self) -> String {
        match self {
            Self::Cold => "sequential 1 MiB, cold".into(),
            Self::Warm => "sequential 1 MiB, again".into(),
            Self::Delay(kib) => format!("delay of a {} read", size(kib)),
            Self::Random(kib) => format!("random {}", size(kib)),
            Self::Neighbours => "1 MiB read, two busy neighbours".into(),
            Self::Write => "write".into(),
            Self::Append => "append".into(),
            Self::Delete => "delete".into(),
        }
    }

    /// Whether it changes HDFS; then the agent runs on the side of viola only.
    pub fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Append | Self::Delete)
    }

    /// Sides on which it is measured.
    pub fn sides(self) -> &'static [Side] {
        match self {
            Self::Cold | Self::Warm | Self::Random(_) => &Side::ALL,
            Self::Delay(_) | Self::Neighbours | Self::Write | Self::Append | Self::Delete => {
                &[Side::Stock, Side::Viola]
            }
        }
    }

    /// The request to the benchmark client; `seed` gives all sides of a round the same places.
    pub fn request(self, side: Side, sizes: &Sizes, seed: usize) -> String {
        let side = side.word();
        let scratch = sizes.scratch;
        match self {
            Self::Cold | Self::Warm => format!("{side} skim {FILE} {}", 1 << 20),
            Self::Delay(kib) => format!("{side} skim {FILE} {}", kib << 10),
            Self::Random(kib) => {
                format!("{side} pread {FILE} {} {} {seed}", sizes.random, kib << 10)
            }
            Self::Neighbours => {
                format!("{side} pread {FILE} {} {} {seed}", sizes.disturbed, 1 << 20)
            }
            Self::Write => format!("{side} write {SCRATCH} {scratch} {BLOCK} {seed}"),
            Self::Append => format!("{side} append {SCRATCH} {} {seed}", scratch / 8),
            Self::Delete => format!("{side} delete {SCRATCH}"),
        }
    }
}

/// The file that is read.
pub const FILE: &str = "/bench";
/// The file that is written, appended to and deleted.
pub const SCRATCH: &str = "/scratch";
/// HDFS's own block size.
pub const BLOCK: u64 = 128 << 20;

/// How much of everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes of the file that is read.
    pub file: u64,
    /// Bytes written; the last block must not be full, or appending would begin a new one.
    pub scratch: u64,
    /// Random reads.
    pub random: u32,
    /// Reads beside busy neighbours.
    pub disturbed: u32,
}

impl Sizes {
    /// Of a full run, or of a quick one.
    pub fn new(quick: bool) -> Self {
        match quick {
            false => Self {
                file: 512 << 20,
                scratch: 192 << 20,
                random: 2000,
                disturbed: 60,
            },
            true => Self {
                file: 128 << 20,
                scratch: 64 << 20,
                random: 300,
                disturbed: 20,
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
            Work::Write.request(Side::Stock, &sizes, 2),
            "stock write /scratch 67108864 134217728 2"
        );
    }

    #[test]
    fn names_are_told_in_the_usual_units() {
        assert_eq!(Work::Delay(4096).name(), "delay of a 4 MiB read");
        assert_eq!(Work::Random(64).name(), "random 64 KiB");
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
