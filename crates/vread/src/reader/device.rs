// SPDX-License-Identifier: Apache-2.0
//! The virtio-fs device: takes requests from virtqueues and serves them.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex};

use fuse_backend_rs::api::server::Server;
use fuse_backend_rs::transport::{Reader, VirtioFsWriter, Writer};
use vhost::vhost_user::Backend;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::{VhostUserBackend, VringRwLock, VringT};
use virtio_queue::{DescriptorChain, QueueOwnedT};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryLoadGuard, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{
    EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier,
};

use super::fs::BlockFs;
use super::guest_buffers::{is_first_attempt, retry_waiting, without_waiting};
use super::pool::Pool;
use super::service::{Service, count};

use crate::lock::lock;

/// Feature bits of virtio: version 1, indirect descriptors, event indices.
const VIRTIO_FEATURES: u64 = 1 << 32 | 1 << 28 | 1 << 29;
/// Maximum queue length. A request of 1 MiB needs a descriptor for each page and some more.
const QUEUE_LENGTH: usize = 1024;
/// Number of request queues. A VM uses at most one per vCPU.
pub(super) const QUEUES: usize = 4;
/// Number of threads that wait for disks.
pub(super) const DISK_THREADS: usize = 4;
/// The mount tag, by which a VM mounts the device.
const TAG: &[u8] = b"viola";
/// Length of the mount tag in the device configuration, bytes.
const TAG_BYTES: usize = 36;

/// A snapshot of a VM's memory map.
pub(super) type Memory = GuestMemoryLoadGuard<GuestMemoryMmap>;
type Chain = DescriptorChain<Memory>;

/// The device of one connection.
pub(super) struct Device {
    inner: Arc<Inner>,
    /// Threads that wait for disks.
    pool: Pool<Job>,
    memory: Mutex<GuestMemoryAtomic<GuestMemoryMmap>>,
    exits: Arc<Mutex<Vec<RawFd>>>,
    /// The back-channel to the VMM. Nothing is sent on it, but its end tells some VMMs (UML) that the worker has
    /// ended.
    back: Mutex<Option<Backend>>,
}

struct Inner {
    server: Server<BlockFs>,
    service: Arc<Service>,
}

struct Job {
    chain: Chain,
    vring: VringRwLock,
}

impl Inner {
    /// Serves one request and returns the length of the answer.
    fn serve(&self, chain: &Chain) -> u32 {
        if is_first_attempt() {
            count(&self.service.counts.requests);
        }
        match serve_chain(&self.server, chain) {
            Some(length) => u32::try_from(length).unwrap_or(0),
            None => {
                count(&self.service.counts.malformed);
                0
            }
        }
    }
}

/// Serves the request of a descriptor chain. Returns the length of the answer, or `None` when the request is
/// malformed.
pub(super) fn serve_chain(server: &Server<BlockFs>, chain: &Chain) -> Option<usize> {
    let memory = chain.memory();
    let reader = Reader::from_descriptor_chain(memory, chain.clone()).ok()?;
    let writer = VirtioFsWriter::new(memory, chain.clone()).ok()?;
    let writer = Writer::VirtioFs(writer);
    server.handle_message(reader, writer, None, None).ok()
}

/// Returns a request to the VM.
fn finish(vring: &VringRwLock, head: u16, length: u32) {
    // A failure means that the VM's ring address is invalid; there is no way to report that to the VM.
    let _ = vring.add_used(head, length);
    if vring.needs_notification().unwrap_or(true) {
        let _ = vring.signal_used_queue();
    }
}

impl Device {
    pub(super) fn new(
        service: &Arc<Service>,
        uid: u32,
        connection: Option<u64>,
        memory: GuestMemoryAtomic<GuestMemoryMmap>,
    ) -> io::Result<Self> {
        let fs = BlockFs::for_connection(service.clone(), uid, connection);
        let inner = Arc::new(Inner {
            server: Server::new(fs),
            service: service.clone(),
        });
        let serving = inner.clone();
        let pool = Pool::new(DISK_THREADS, QUEUE_LENGTH, move |job: Job| {
            let length = retry_waiting(|| serving.serve(&job.chain));
            finish(&job.vring, job.chain.head_index(), length);
        })?;
        Ok(Self {
            inner,
            pool,
            memory: Mutex::new(memory),
            exits: Arc::default(),
            back: Mutex::default(),
        })
    }

    /// The descriptors that the library leaves open when it ends.
    pub(super) fn exit_descriptors(&self) -> ExitDescriptors {
        ExitDescriptors(self.exits.clone())
    }

    /// Serves all pending requests.
    fn serve_queue(&self, vring: &VringRwLock) {
        loop {
            let _ = vring.disable_notification();
            while let Some(chain) = self.next(vring) {
                let head = chain.head_index();
                if let Some(length) = without_waiting(|| self.inner.serve(&chain)) {
                    finish(vring, head, length);
                    continue;
                }
                let vring = vring.clone();
                // The queue of the pool is bounded, because a VM may submit the same request repeatedly.
                if let Err(job) = self.pool.submit(Job { chain, vring }) {
                    let length = retry_waiting(|| self.inner.serve(&job.chain));
                    finish(&job.vring, head, length);
                }
            }
            if !vring.enable_notification().unwrap_or(false) {
                return;
            }
        }
    }

    fn next(&self, vring: &VringRwLock) -> Option<Chain> {
        let memory = {
            let memory = lock(&self.memory);
            memory.memory()
        };
        let mut state = vring.get_mut();
        let queue = state.get_queue_mut();
        queue.iter(memory).ok()?.next()
    }
}

/// See [`Device::exit_descriptors`]. Dropping it closes them, which must happen after the library has ended.
pub(super) struct ExitDescriptors(Arc<Mutex<Vec<RawFd>>>);

impl Drop for ExitDescriptors {
    fn drop(&mut self) {
        let mut exits = lock(&self.0);
        for fd in exits.drain(..) {
            // SAFETY: the library took it out of its owner and never closes it.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
        }
    }
}

impl VhostUserBackend for Device {
    type Bitmap = ();
    type Vring = VringRwLock;

    fn num_queues(&self) -> usize {
        1 + QUEUES
    }

    fn max_queue_size(&self) -> usize {
        QUEUE_LENGTH
    }

    fn features(&self) -> u64 {
        VIRTIO_FEATURES | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
    }

    fn set_event_idx(&self, _: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let mut config = [0; TAG_BYTES + size_of::<u32>()];
        config[..TAG.len()].copy_from_slice(TAG);
        config[TAG_BYTES..].copy_from_slice(&(QUEUES as u32).to_le_bytes());
        let end = offset.saturating_add(size) as usize;
        let inside = config.get(offset as usize..end);
        inside.map(<[u8]>::to_vec).unwrap_or_default()
    }

    fn update_memory(&self, memory: GuestMemoryAtomic<GuestMemoryMmap>) -> io::Result<()> {
        *lock(&self.memory) = memory;
        Ok(())
    }

    fn set_backend_req_fd(&self, back: Backend) {
        *lock(&self.back) = Some(back);
    }

    /// The first thread serves the high-priority queue and the first request queue; each further queue has its own
    /// thread.
    fn queues_per_thread(&self) -> Vec<u64> {
        let further = (2..=QUEUES).map(|queue| 1 << queue);
        std::iter::once(0b11).chain(further).collect()
    }

    fn exit_event(&self, _: usize) -> Option<(EventConsumer, EventNotifier)> {
        let (consumer, notifier) = new_event_consumer_and_notifier(EventFlag::NONBLOCK).ok()?;
        let mut exits = lock(&self.exits);
        exits.push(consumer.as_raw_fd());
        Some((consumer, notifier))
    }

    fn handle_event(
        &self,
        event: u16,
        set: EventSet,
        vrings: &[VringRwLock],
        _: usize,
    ) -> io::Result<()> {
        if set == EventSet::IN
            && let Some(vring) = vrings.get(usize::from(event))
        {
            self.serve_queue(vring);
        }
        Ok(())
    }
}
