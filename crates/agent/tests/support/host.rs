// SPDX-License-Identifier: Apache-2.0
//! The host of the agent: speaks the protocol over the lab's socket, and reads the disk's image.
#![allow(dead_code, clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use viola_extents::host::{Image, Layer};
use viola_proto::agent::{
    CHALLENGE_BYTES, Challenge, FileMap, FrameReader, FromAgent, Lease, Limits, Stats, ToAgent,
    VERSION, WithdrawReason, encode,
};

/// State and behaviour of the host.
#[derive(Default)]
pub struct State {
    /// Named blocks by lease.
    pub names: BTreeMap<Lease, Named>,
    /// Leases whose withdrawal is not confirmed.
    pub held: BTreeSet<Lease>,
    /// All withdrawals: block, stamp, reason.
    pub withdrawn: Vec<(i64, u64, WithdrawReason)>,
    /// Reasons of the withdrawals of whole file systems.
    pub withdrawn_all: Vec<WithdrawReason>,
    pub hellos: usize,
    pub proofs: usize,
    pub stats: Stats,
    /// Withdrawals are not confirmed.
    pub hold: bool,
    /// Hellos are not answered.
    pub silent: bool,
    /// Proofs are not accepted.
    pub blind: bool,
    pub ended: bool,
    pub used: BTreeSet<Lease>,
}

#[derive(Clone)]
pub struct Named {
    pub id: i64,
    pub stamp: u64,
    pub data: FileMap,
    pub meta: FileMap,
}

pub struct Host {
    shared: Arc<(Mutex<State>, Condvar)>,
    out: UnixStream,
    image: PathBuf,
}

impl Host {
    pub fn new(socket: PathBuf, image: PathBuf) -> Self {
        Self::with(socket, image, State::default())
    }

    /// A host with this behaviour.
    pub fn with(socket: PathBuf, image: PathBuf, state: State) -> Self {
        let end = Instant::now() + Duration::from_secs(30);
        let stream = loop {
            match UnixStream::connect(&socket) {
                Ok(stream) => break stream,
                Err(e) => assert!(Instant::now() < end, "{}: {e}", socket.display()),
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let shared = Arc::new((Mutex::new(state), Condvar::new()));
        let host = Self {
            shared: Arc::clone(&shared),
            out: stream.try_clone().unwrap(),
            image,
        };
        host.say(&ToAgent::HelloRequest { version: VERSION });
        let theirs = Self {
            shared,
            out: stream.try_clone().unwrap(),
            image: host.image.clone(),
        };
        std::thread::spawn(move || theirs.listen(stream));
        host
    }

    fn say(&self, message: &ToAgent) {
        let _ = (&self.out).write_all(&encode(message).unwrap());
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.shared.0.lock().unwrap()
    }

    /// Waits for a condition on the state.
    pub fn wait(&self, what: &str, wanted: impl Fn(&State) -> bool) {
        let end = Instant::now() + Duration::from_secs(30);
        let mut state = self.state();
        while !wanted(&state) {
            let left = end.saturating_duration_since(Instant::now());
            assert!(
                !left.is_zero(),
                "not in time: {what}; named {:?}, withdrawn {:?}, {:?}",
                blocks(&state),
                state.withdrawn,
                state.stats
            );
            state = self.shared.1.wait_timeout(state, left).unwrap().0;
        }
    }

    /// Waits until exactly these blocks are named, and nothing waits for a confirmation.
    pub fn wait_named(&self, wanted: &[(i64, u64)]) {
        self.wait(&format!("{wanted:?} are named"), |s| {
            blocks(s) == wanted && s.held.is_empty()
        });
    }

    pub fn named(&self, id: i64) -> Named {
        let state = self.state();
        let found = state.names.values().find(|n| n.id == id);
        found.unwrap_or_else(|| panic!("{id} is not named")).clone()
    }

    /// The reason of a block's last withdrawal.
    pub fn why(&self, id: i64) -> Option<WithdrawReason> {
        let state = self.state();
        let all = state.withdrawn.iter().rev();
        all.map(|(of, _, why)| (*of, *why))
            .find(|(of, _)| *of == id)
            .map(|(_, why)| why)
    }

    /// Confirms pending withdrawals, and later ones at once.
    pub fn release(&self) {
        let mut state = self.state();
        state.hold = false;
        let leases: Vec<Lease> = std::mem::take(&mut state.held).into_iter().collect();
        state.names.retain(|lease, _| !leases.contains(lease));
        drop(state);
        self.say(&ToAgent::Withdrawn { leases });
    }

    /// Sends garbage, and half a message.
    pub fn garbage(&self) {
        let half = encode(&ToAgent::Ping { n: 5, session: 0 }).unwrap();
        let bytes = [
            b"VIO1\0\0VIO\n{}".as_slice(),
            &half[..20],
            &[0xff; 300],
            b"VIO1",
        ]
        .concat();
        (&self.out).write_all(&bytes).unwrap();
    }

    pub fn prove_again(&self, fs: u32) {
        self.say(&ToAgent::ProveAgain { fs });
    }

    /// The bytes of a file, from the image of the disk.
    pub fn bytes(&self, map: &FileMap) -> Vec<u8> {
        let image = Image::open(vec![Layer::raw(File::open(&self.image).unwrap())]).unwrap();
        let extents: Vec<_> = map
            .extents
            .iter()
            .map(|e| viola_extents::Extent {
                logical: e.logical,
                physical: e.physical,
                length: e.length,
                zero: e.zero,
            })
            .collect();
        let checked = image.check(&extents, map.size).unwrap();
        let mut bytes = vec![0; map.size as usize];
        assert_eq!(
            image.read_at(&checked, 0, &mut bytes).unwrap() as u64,
            map.size
        );
        bytes
    }

    fn listen(self, mut stream: UnixStream) {
        let mut reader = FrameReader::new();
        while let Ok(Some(message)) = reader.wait::<FromAgent>(&mut stream) {
            let answers = self.take(message.unwrap());
            self.shared.1.notify_all();
            for answer in answers {
                self.say(&answer);
            }
        }
        self.state().ended = true;
        self.shared.1.notify_all();
    }

    fn take(&self, message: FromAgent) -> Vec<ToAgent> {
        let mut state = self.state();
        match message {
            FromAgent::Hello {
                version, session, ..
            } => {
                assert_eq!(version, VERSION);
                state.hellos += 1;
                if state.silent {
                    return Vec::new();
                }
                state.names.clear();
                state.held.clear();
                state.used.clear();
                let welcome = ToAgent::Welcome {
                    version: VERSION,
                    session,
                    epoch: state.hellos as u64,
                    limits: Limits {
                        blocks: 1000,
                        extents: 5000,
                        names_per_s: 100,
                    },
                    challenge: challenge(state.hellos),
                };
                vec![welcome, ToAgent::Ping { n: 1, session }]
            }
            FromAgent::Proof { fs, map, .. } => {
                state.proofs += 1;
                let content = challenge(state.hellos).proof_content(fs);
                if state.blind || self.bytes(&map) != content {
                    let why = "no disk has it".into();
                    return vec![ToAgent::ProofBad { fs, why }];
                }
                vec![ToAgent::ProofOk { fs }]
            }
            FromAgent::Name {
                lease,
                key,
                data,
                meta,
                ..
            } => {
                assert!(state.used.insert(lease), "lease {lease} used twice");
                let name = Named {
                    id: key.id(),
                    stamp: key.stamp(),
                    data,
                    meta,
                };
                let twice = state.names.iter().any(|(l, n)| {
                    n.id == name.id && n.stamp == name.stamp && !state.held.contains(l)
                });
                assert!(!twice, "{key} named twice");
                state.names.insert(lease, name);
                vec![ToAgent::Named { lease }]
            }
            FromAgent::Withdraw { leases, why } => {
                for lease in &leases {
                    if let Some(name) = state.names.get(lease).cloned()
                        && !state.held.contains(lease)
                    {
                        state.withdrawn.push((name.id, name.stamp, why));
                    }
                }
                if state.hold {
                    state.held.extend(leases);
                    return Vec::new();
                }
                state.names.retain(|lease, _| !leases.contains(lease));
                vec![ToAgent::Withdrawn { leases }]
            }
            FromAgent::WithdrawAll { why, .. } => {
                state.withdrawn_all.push(why);
                Vec::new()
            }
            FromAgent::Stats(stats) => {
                state.stats = stats;
                Vec::new()
            }
            FromAgent::Pong { .. } | FromAgent::Pipe(_) => Vec::new(),
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // the listening thread drops its handle too
        if Arc::strong_count(&self.shared) > 1 {
            let _ = self.out.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// The challenge of a session.
fn challenge(hellos: usize) -> Challenge {
    Challenge([hellos as u8; CHALLENGE_BYTES])
}

/// Blocks that may be read and are not being withdrawn.
fn blocks(state: &State) -> Vec<(i64, u64)> {
    let mut all: Vec<_> = state
        .names
        .iter()
        .filter(|(lease, _)| !state.held.contains(lease))
        .map(|(_, n)| (n.id, n.stamp))
        .collect();
    all.sort_unstable();
    all
}
