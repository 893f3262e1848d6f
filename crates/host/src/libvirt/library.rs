// SPDX-License-Identifier: Apache-2.0
//! The functions of libvirt's C library, loaded at run time. Its ABI has been stable since 2005.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

use libloading::Library;

use super::{Domain, DomainState};

/// The library's file name on all Linux distributions.
const FILE: &str = "libvirt.so.0";

/// An opaque object of the library.
pub(super) type Handle = *mut c_void;

/// Callback for lifecycle events of a domain.
pub(super) type OnLife = unsafe extern "C" fn(Handle, Handle, c_int, c_int, *mut c_void) -> c_int;
/// Callback for the end of the connection.
pub(super) type OnClose = unsafe extern "C" fn(Handle, c_int, *mut c_void);
type OnError = unsafe extern "C" fn(*mut c_void, *mut c_void);

macro_rules! functions {
    ($($field:ident = $name:literal: fn($($arg:ty),*) -> $out:ty;)*) => {
        /// The loaded library.
        pub(super) struct Libvirt {
            $($field: unsafe extern "C" fn($($arg),*) -> $out,)*
            /// Keeps the library loaded as long as its functions.
            _library: Library,
        }

        impl Libvirt {
            /// Loads the library.
            pub(super) fn load() -> Result<Self, libloading::Error> {
                // SAFETY: the initialisers of libvirt and of the libraries that it needs have no conditions.
                let library = unsafe { Library::new(FILE)? };
                Ok(Self {
                    // SAFETY: the types are those of libvirt's public headers (libvirt-host.h, -domain.h, -event.h).
                    $($field: unsafe { *library.get(concat!($name, "\0").as_bytes())? },)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    register_loop = "virEventRegisterDefaultImpl": fn() -> c_int;
    run_loop = "virEventRunDefaultImpl": fn() -> c_int;
    open = "virConnectOpenReadOnly": fn(*const c_char) -> Handle;
    keep_alive = "virConnectSetKeepAlive": fn(Handle, c_int, c_uint) -> c_int;
    on_close = "virConnectRegisterCloseCallback": fn(Handle, OnClose, *mut c_void, *mut c_void) -> c_int;
    on_event = "virConnectDomainEventRegisterAny": fn(Handle, Handle, c_int, *mut c_void, *mut c_void, *mut c_void) -> c_int;
    list = "virConnectListAllDomains": fn(Handle, *mut *mut Handle, c_uint) -> c_int;
    name = "virDomainGetName": fn(Handle) -> *const c_char;
    uuid = "virDomainGetUUIDString": fn(Handle, *mut c_char) -> c_int;
    state = "virDomainGetState": fn(Handle, *mut c_int, *mut c_int, c_uint) -> c_int;
    free = "virDomainFree": fn(Handle) -> c_int;
    last_error = "virGetLastErrorMessage": fn() -> *const c_char;
    set_error_func = "virSetErrorFunc": fn(*mut c_void, OnError) -> ();
}

/// `VIR_CONNECT_LIST_DOMAINS_ACTIVE`
const ACTIVE: c_uint = 1;
/// `VIR_UUID_STRING_BUFLEN`
const UUID_BYTES: usize = 37;

unsafe extern "C" fn ignore_error(_: *mut c_void, _: *mut c_void) {}

impl Libvirt {
    /// The library's last error in this thread.
    fn last_error_text(&self) -> String {
        // SAFETY: it answers a static or thread-owned string.
        let text = unsafe { (self.last_error)() };
        text_of(text).unwrap_or_else(|| "libvirt gives no reason".into())
    }

    fn done(&self, result: c_int) -> Result<(), String> {
        match result {
            0.. => Ok(()),
            _ => Err(self.last_error_text()),
        }
    }

    /// Registers the library's event loop and stops it from printing errors.
    pub(super) fn start_event_loop(&self) -> Result<(), String> {
        // SAFETY: called once, before any connection.
        unsafe { (self.set_error_func)(null_mut(), ignore_error) };
        // SAFETY: as above.
        let registered = unsafe { (self.register_loop)() };
        self.done(registered)
    }

    /// One iteration of the event loop: waits for an event and runs its callback.
    pub(super) fn run_once(&self) -> Result<(), String> {
        // SAFETY: after `begin`, in one thread.
        let turned = unsafe { (self.run_loop)() };
        self.done(turned)
    }

    /// Connects read-only.
    pub(super) fn connect(&self, uri: &CStr) -> Result<Handle, String> {
        // SAFETY: the string outlives the call.
        let connection = unsafe { (self.open)(uri.as_ptr()) };
        if connection.is_null() {
            return Err(self.last_error_text());
        }
        Ok(connection)
    }

    /// Ends the connection when libvirt's daemon has not answered `count` probes in a row, one every `seconds`.
    pub(super) fn keep_alive(
        &self,
        connection: Handle,
        seconds: i32,
        count: u32,
    ) -> Result<(), String> {
        // SAFETY: the connection is open. 1 means that libvirt's daemon has no keep-alive.
        let done = unsafe { (self.keep_alive)(connection, seconds, count) };
        self.done(done)
    }

    /// Registers the callback for the end of the connection. `opaque` must outlive the connection.
    pub(super) fn on_close(
        &self,
        connection: Handle,
        call: OnClose,
        opaque: *mut c_void,
    ) -> Result<(), String> {
        // SAFETY: the connection is open, and the caller keeps `opaque` alive.
        let done = unsafe { (self.on_close)(connection, call, opaque, null_mut()) };
        self.done(done)
    }

    /// Registers the callback for lifecycle events (`VIR_DOMAIN_EVENT_ID_LIFECYCLE`). `opaque` must outlive the connection.
    pub(super) fn on_life(
        &self,
        connection: Handle,
        call: OnLife,
        opaque: *mut c_void,
    ) -> Result<(), String> {
        // SAFETY: the caller keeps `opaque` alive; event 0 takes a callback of this type.
        let done = unsafe {
            (self.on_event)(
                connection,
                null_mut(),
                0,
                call as *mut c_void,
                opaque,
                null_mut(),
            )
        };
        self.done(done)
    }

    /// Registers a callback of the right type for another event, by its number. `opaque` must outlive the connection.
    pub(super) fn on_event(
        &self,
        connection: Handle,
        event: i32,
        call: *mut c_void,
        opaque: *mut c_void,
    ) -> Result<(), String> {
        // SAFETY: the caller keeps `opaque` alive and passes a callback of the event's type.
        let done =
            unsafe { (self.on_event)(connection, null_mut(), event, call, opaque, null_mut()) };
        self.done(done)
    }

    /// The running domains.
    pub(super) fn domains(&self, connection: Handle) -> Result<Vec<Domain>, String> {
        let mut all: *mut Handle = null_mut();
        // SAFETY: the connection is open; the list is ours afterwards.
        let count = unsafe { (self.list)(connection, &raw mut all, ACTIVE) };
        self.done(count)?;
        let mut found = Vec::new();
        for i in 0..count.unsigned_abs() as usize {
            // SAFETY: the list has `count` domains.
            let domain = unsafe { *all.add(i) };
            found.extend(self.domain(domain));
            // SAFETY: it is ours and is not used any more.
            unsafe { (self.free)(domain) };
        }
        // SAFETY: made by malloc in the library, as its documentation says.
        unsafe { libc::free(all.cast()) };
        Ok(found)
    }

    /// The present state of a domain; `None` when it is gone.
    pub(super) fn domain(&self, domain: Handle) -> Option<Domain> {
        // SAFETY: a domain that libvirt has given us; the string is its own.
        let name = text_of(unsafe { (self.name)(domain) })?;
        let mut uuid = [0 as c_char; UUID_BYTES];
        // SAFETY: the buffer is as long as documented.
        if unsafe { (self.uuid)(domain, uuid.as_mut_ptr()) } < 0 {
            return None;
        }
        let (mut state, mut reason) = (5, 0);
        // SAFETY: both numbers are there to be written to. A domain that is gone is off.
        unsafe { (self.state)(domain, &raw mut state, &raw mut reason, 0) };
        Some(Domain {
            name: crate::vm::printable(&name),
            uuid: text_of(uuid.as_ptr())?,
            state: DomainState::of(state),
        })
    }
}

/// Copies a string of the library.
fn text_of(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: not null, and all of libvirt's strings end with a zero.
    Some(
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned(),
    )
}
