// SPDX-License-Identifier: Apache-2.0
//! The process that talks to libvirt: connects, says what is there and what happens, and ends with the connection.

use std::ffi::{CString, c_char, c_int, c_void};
use std::io::{self, Write};

use super::library::{Handle, Libvirt};
use super::{DomainState, Message};

/// A daemon of libvirt's that has not answered for this time, in seconds, three times in a row is taken for gone.
const KEEP_ALIVE: (i32, u32) = (5, 3);

/// Why [`tell`] has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamEnd {
    /// There is no library.
    NoLibrary,
    /// No connection, or not any more.
    Disconnected,
    /// Nobody reads any more.
    ReaderGone,
}

/// Where the lines go, and what happened on the way.
struct EventWriter<'a> {
    libvirt: &'a Libvirt,
    out: &'a mut dyn Write,
    reader_gone: bool,
    closed: Option<i32>,
}

impl EventWriter<'_> {
    fn say(&mut self, word: &Message) {
        self.reader_gone |= say(self.out, word).is_err();
    }

    fn event(&mut self, domain: Handle, what: &str, state: Option<DomainState>) {
        let Some(mut domain) = self.libvirt.domain(domain) else {
            return;
        };
        domain.state = state.unwrap_or(domain.state);
        self.say(&Message::Event {
            domain,
            what: what.to_owned(),
        });
    }
}

fn say(out: &mut dyn Write, word: &Message) -> io::Result<()> {
    let mut line = serde_json::to_string(word)?;
    line.push('\n');
    out.write_all(line.as_bytes())?;
    out.flush()
}

/// Connects to `uri` and writes a [`Message`] a line, until the connection ends or nobody reads. The calling thread is the
/// only one that does; it is called once in a process.
pub fn stream_events(uri: &str, out: &mut dyn Write) -> StreamEnd {
    let gone = |out: &mut dyn Write, why: String, no_library: bool| {
        let told = say(out, &Message::Disconnected { why, no_library });
        match (told, no_library) {
            (Err(_), _) => StreamEnd::ReaderGone,
            (_, true) => StreamEnd::NoLibrary,
            (_, false) => StreamEnd::Disconnected,
        }
    };
    let libvirt = match Libvirt::load() {
        Ok(libvirt) => libvirt,
        Err(e) => return gone(out, format!("libvirt's library is not here: {e}"), true),
    };
    match run(&libvirt, uri, out) {
        Ok(()) => StreamEnd::ReaderGone,
        Err(why) => gone(out, why, false),
    }
}

/// Ends well only when nobody reads.
fn run(libvirt: &Libvirt, uri: &str, out: &mut dyn Write) -> Result<(), String> {
    let address = CString::new(uri).map_err(|_| format!("{uri}: no address of libvirt"))?;
    libvirt.begin()?;
    let connection = libvirt.connect(&address)?;
    let mut writer = EventWriter {
        libvirt,
        out,
        reader_gone: false,
        closed: None,
    };
    // Used by the callbacks below and between the loop's turns, which call them, never at once.
    let opaque: *mut c_void = (&raw mut writer).cast();
    libvirt.on_close(connection, closed, opaque)?;
    libvirt.keep_alive(connection, KEEP_ALIVE.0, KEEP_ALIVE.1)?;
    libvirt.on_life(connection, lived, opaque)?;
    // What may change a VM that runs, by libvirt's number. A driver or an old library may not know one of them.
    let others: [(i32, *mut c_void); 4] = [
        (1, rebooted as *mut c_void),
        (15, device_removed as *mut c_void),
        (17, tunable as *mut c_void),
        (19, device_added as *mut c_void),
    ];
    for (number, call) in others {
        let _ = libvirt.on_event(connection, number, call, opaque);
    }
    // After the events were asked for, so that none is lost between.
    let domains = libvirt.domains(connection)?;
    writer_of(opaque).say(&Message::Connected { domains });
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
        libvirt.turn()?;
    }
}

fn writer_of<'a>(opaque: *mut c_void) -> &'a mut EventWriter<'a> {
    // SAFETY: it is the writer of `talk`, which outlives the connection, and one reference is used at a time.
    unsafe { &mut *opaque.cast::<EventWriter<'a>>() }
}

unsafe extern "C" fn closed(_: Handle, reason: c_int, opaque: *mut c_void) {
    writer_of(opaque).closed = Some(reason);
}

unsafe extern "C" fn lived(
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

/// What its cores may give it: shares, quotas, pinning.
unsafe extern "C" fn tunable(
    _: Handle,
    domain: Handle,
    _: *mut c_void,
    _: c_int,
    opaque: *mut c_void,
) {
    writer_of(opaque).event(domain, "tunable", None);
}
