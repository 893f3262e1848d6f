// SPDX-License-Identifier: Apache-2.0
//! The process that talks to libvirt: it connects, reports domains and events, and ends with the connection.

use std::ffi::{CString, c_char, c_int, c_void};
use std::io::{self, Write};

use super::library::{Handle, Libvirt};
use super::{DomainState, Message};

/// Interval (s) and number of unanswered keep-alive probes after which libvirt's daemon counts as gone.
const KEEP_ALIVE: (i32, u32) = (5, 3);

/// Why [`stream_events`] has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamEnd {
    /// This host has no libvirt library.
    NoLibrary,
    /// No connection, or it has ended.
    Disconnected,
    /// The reader has closed its end.
    ReaderGone,
}

/// Writes the messages; the callbacks share it.
struct EventWriter<'a> {
    libvirt: &'a Libvirt,
    out: &'a mut dyn Write,
    reader_gone: bool,
    closed: Option<i32>,
}

impl EventWriter<'_> {
    fn write(&mut self, message: &Message) {
        self.reader_gone |= write_line(self.out, message).is_err();
    }

    fn event(&mut self, domain: Handle, what: &str, state: Option<DomainState>) {
        let Some(mut domain) = self.libvirt.domain(domain) else {
            return;
        };
        domain.state = state.unwrap_or(domain.state);
        self.write(&Message::Event {
            domain,
            what: what.to_owned(),
        });
    }
}

fn write_line(out: &mut dyn Write, message: &Message) -> io::Result<()> {
    let mut line = serde_json::to_string(message)?;
    line.push('\n');
    out.write_all(line.as_bytes())?;
    out.flush()
}

/// Connects to `uri` and writes one [`Message`] a line, until the connection ends or the reader is gone. Call it once in a
/// process; the calling thread does all the work.
pub fn stream_events(uri: &str, out: &mut dyn Write) -> StreamEnd {
    let gone = |out: &mut dyn Write, why: String, no_library: bool| {
        let written = write_line(out, &Message::Disconnected { why, no_library });
        match (written, no_library) {
            (Err(_), _) => StreamEnd::ReaderGone,
            (_, true) => StreamEnd::NoLibrary,
            (_, false) => StreamEnd::Disconnected,
        }
    };
    let libvirt = match Libvirt::load() {
        Ok(libvirt) => libvirt,
        Err(e) => return gone(out, format!("cannot load libvirt's library: {e}"), true),
    };
    match run(&libvirt, uri, out) {
        Ok(()) => StreamEnd::ReaderGone,
        Err(why) => gone(out, why, false),
    }
}

/// Returns `Ok` only when the reader is gone.
fn run(libvirt: &Libvirt, uri: &str, out: &mut dyn Write) -> Result<(), String> {
    let address = CString::new(uri).map_err(|_| format!("{uri}: not a libvirt URI"))?;
    libvirt.start_event_loop()?;
    let connection = libvirt.connect(&address)?;
    let mut writer = EventWriter {
        libvirt,
        out,
        reader_gone: false,
        closed: None,
    };
    // The callbacks below and the loop use it in turn, never at once.
    let opaque: *mut c_void = (&raw mut writer).cast();
    libvirt.on_close(connection, closed, opaque)?;
    libvirt.keep_alive(connection, KEEP_ALIVE.0, KEEP_ALIVE.1)?;
    libvirt.on_life(connection, lifecycle, opaque)?;
    // Events that may change a running VM, by libvirt's number. An old library or driver may not know one of them.
    let others: [(i32, *mut c_void); 4] = [
        (1, rebooted as *mut c_void),
        (15, device_removed as *mut c_void),
        (17, tunable as *mut c_void),
        (19, device_added as *mut c_void),
    ];
    for (number, call) in others {
        let _ = libvirt.on_event(connection, number, call, opaque);
    }
    // After the callbacks are registered, so that no event is lost.
    let domains = libvirt.domains(connection)?;
    writer_of(opaque).write(&Message::Connected { domains });
    loop {
        let writer = writer_of(opaque);
        if writer.reader_gone {
            return Ok(());
        }
        if let Some(reason) = writer.closed {
            return Err(match reason {
                0 => "the connection to libvirt failed",
                1 => "libvirt's daemon has ended",
                2 => "libvirt's daemon does not answer",
                _ => "the connection to libvirt was closed",
            }
            .to_owned());
        }
        libvirt.run_once()?;
    }
}

fn writer_of<'a>(opaque: *mut c_void) -> &'a mut EventWriter<'a> {
    // SAFETY: it is the writer of `talk`, which outlives the connection, and one reference is used at a time.
    unsafe { &mut *opaque.cast::<EventWriter<'a>>() }
}

unsafe extern "C" fn closed(_: Handle, reason: c_int, opaque: *mut c_void) {
    writer_of(opaque).closed = Some(reason);
}

unsafe extern "C" fn lifecycle(
    _: Handle,
    domain: Handle,
    event: c_int,
    _: c_int,
    opaque: *mut c_void,
) -> c_int {
    let (what, state) = match event {
        2 => ("started", None),
        3 => ("suspended", None),
        4 => ("resumed", None),
        5 => ("stopped", Some(DomainState::Off)),
        6 => ("shutdown", None),
        7 => ("asleep", None),
        8 => ("crashed", None),
        // defined and undefined: a VM that does not run
        _ => return 0,
    };
    writer_of(opaque).event(domain, what, state);
    0
}

unsafe extern "C" fn rebooted(_: Handle, domain: Handle, opaque: *mut c_void) {
    writer_of(opaque).event(domain, "rebooted", None);
}

unsafe extern "C" fn device_removed(
    _: Handle,
    domain: Handle,
    _: *const c_char,
    opaque: *mut c_void,
) {
    writer_of(opaque).event(domain, "device removed", None);
}

unsafe extern "C" fn device_added(
    _: Handle,
    domain: Handle,
    _: *const c_char,
    opaque: *mut c_void,
) {
    writer_of(opaque).event(domain, "device added", None);
}

/// CPU shares, quotas or pinning have changed.
unsafe extern "C" fn tunable(
    _: Handle,
    domain: Handle,
    _: *mut c_void,
    _: c_int,
    opaque: *mut c_void,
) {
    writer_of(opaque).event(domain, "tunable", None);
}
