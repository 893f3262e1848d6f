// SPDX-License-Identifier: Apache-2.0
//! HDFS clients of a VM that reads blocks past their DataNode: the mount, the plug-in's jar, and its property in
//! `hdfs-site.xml`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use roxmltree::Document;

use crate::relay::settings::Settings as MountSettings;
use crate::turbo::read::virtio;
use crate::turbo::system::RealSystem;

/// The plug-in, where the package installs it.
pub const JAR: &str = "/usr/share/java/viola-hdfs.jar";
/// Where the blocks appear, which is the plug-in's default.
pub const MOUNT: &str = "/mnt/viola";
/// The unit of the mount.
pub const MOUNT_UNIT: &str = "mnt-viola.mount";

/// The property of HDFS's client that names plug-ins.
const PROPERTY: &str = "dfs.client.replica.accessor.builder.classes";
const PLUG_IN: &str = "org.viola.hdfs.ViolaReplicaAccessorBuilder";
/// File of a configuration that makes a folder one of HDFS.
const SITE: &str = "hdfs-site.xml";
/// Folders of HDFS's configuration as packages have them, below the root.
const PACKAGED: [&str; 2] = ["etc/hadoop/conf", "etc/hadoop"];
/// Folders below which Hadoop is unpacked, and its folder's beginning.
const UNPACKED: [(&str, &str); 2] = [("opt", "hadoop"), ("usr/local", "hadoop")];
/// The device number of virtio-fs (Virtio 1.2, 5.11).
const VIRTIO_FS: u32 = 26;

/// How the host gives blocks to this VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A virtio-fs device of the tag `viola`.
    VirtioFs,
    /// The port of a byte stream.
    Stream,
}

/// The configuration of an HDFS client.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Client {
    /// Its `hdfs-site.xml`.
    pub site: PathBuf,
    /// The folder of its libraries, if it is known.
    pub libraries: Option<PathBuf>,
}

/// The way in which the host gives blocks to this VM, if it does.
pub fn source(root: &Path) -> Option<Source> {
    let port = MountSettings::default().port;
    if root.join(port.trim_start_matches('/')).exists() {
        return Some(Source::Stream);
    }
    // Linux 6.9 and later show the tags.
    let is_ours = |tag: &Path| fs::read_to_string(tag).is_ok_and(|tag| tag.trim() == "viola");
    let has_device = match fs::read_dir(root.join("sys/fs/virtiofs")) {
        Ok(tags) => tags
            .flatten()
            .any(|entry| is_ours(&entry.path().join("tag"))),
        Err(_) => virtio(&RealSystem::new(root))
            .values()
            .any(|kind| *kind == VIRTIO_FS),
    };
    has_device.then_some(Source::VirtioFs)
}

/// The clients whose configuration is where packages have it, in an unpacked Hadoop, or where a running program has it.
/// `programs` are the environments and command lines of processes.
pub fn clients(root: &Path, programs: &[(String, String)]) -> Vec<Client> {
    let mut homes: BTreeSet<PathBuf> = BTreeSet::new();
    let mut folders: BTreeSet<PathBuf> = PACKAGED.map(|folder| root.join(folder)).into();
    for (place, beginning) in UNPACKED {
        let found = fs::read_dir(root.join(place)).into_iter().flatten();
        homes.extend(found.flatten().map(|entry| entry.path()).filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(beginning)
        }));
    }
    for (environment, command) in programs {
        let value = |name: &str| {
            let mut words = environment.split('\0');
            words.find_map(|word| Some(PathBuf::from(word.strip_prefix(name)?.strip_prefix('=')?)))
        };
        let option = "-Dhadoop.home.dir=";
        let of_java = command
            .split('\0')
            .find_map(|word| word.strip_prefix(option));
        homes.extend(value("HADOOP_HOME").or(of_java.map(PathBuf::from)));
        folders.extend(value("HADOOP_CONF_DIR"));
    }
    folders.extend(homes.iter().map(|home| home.join("etc/hadoop")));
    let mut seen = BTreeSet::new();
    let mut clients = Vec::new();
    for folder in folders {
        // Folders of packages are often links to one another.
        let Ok(site) = fs::canonicalize(folder.join(SITE)) else {
            continue;
        };
        if seen.insert(site.clone()) {
            let home = home_of(root, &site, &homes);
            let libraries = home.and_then(|home| libraries(&home));
            clients.push(Client { site, libraries });
        }
    }
    clients
}

/// The home of the Hadoop that has this configuration.
fn home_of(root: &Path, site: &Path, homes: &BTreeSet<PathBuf>) -> Option<PathBuf> {
    let folder = site.parent()?;
    if folder.ends_with("etc/hadoop") && !folder.starts_with(root.join("etc")) {
        return folder.ancestors().nth(2).map(Path::to_owned);
    }
    let packaged = root.join("usr/lib/hadoop");
    let found = homes.iter().chain(packaged.is_dir().then_some(&packaged));
    let mut found: Vec<&PathBuf> = found.collect();
    match found.len() {
        1 => found.pop().cloned(),
        _ => None,
    }
}

/// The folder of libraries that every command of this Hadoop has on its class path.
fn libraries(home: &Path) -> Option<PathBuf> {
    let found = ["share/hadoop/common/lib", "lib"].map(|folder| home.join(folder));
    found.into_iter().find(|folder| {
        let files = fs::read_dir(folder).into_iter().flatten().flatten();
        let mut names = files.map(|file| file.file_name());
        names.any(|name| Path::new(&name).extension().is_some_and(|e| e == "jar"))
    })
}

/// What is to be done with an `hdfs-site.xml`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Site {
    /// It names the plug-in.
    IsThere,
    /// Its new text.
    New(String),
    /// It cannot be changed by setup; what the operator has to do.
    ByHand(String),
}

/// Adds the plug-in's property to the text of an `hdfs-site.xml`; the rest stays as it is.
pub fn with_property(path: &Path, text: &str) -> Site {
    let at = path.display();
    let by_hand = |what: String| Site::ByHand(format!("{at}: {what}"));
    let document = match Document::parse(text) {
        Ok(document) => document,
        Err(e) => return by_hand(format!("{e}; name {PLUG_IN} in {PROPERTY}")),
    };
    let root = document.root_element();
    if !root.has_tag_name("configuration") {
        return by_hand(format!(
            "it is no configuration of Hadoop; name {PLUG_IN} in {PROPERTY}"
        ));
    }
    let child = |node: roxmltree::Node<'_, '_>, name: &str| {
        let found = node.children().find(|n| n.has_tag_name(name));
        found
            .and_then(|n| n.text())
            .map(|text| text.trim().to_owned())
    };
    let mut properties = root.children().filter(|n| n.has_tag_name("property"));
    let named = |n: &roxmltree::Node<'_, '_>| child(*n, "name").as_deref() == Some(PROPERTY);
    if let Some(property) = properties.find(named) {
        let value = child(property, "value").unwrap_or_default();
        return match value.split(',').any(|word| word.trim() == PLUG_IN) {
            true => Site::IsThere,
            false => by_hand(format!("{PROPERTY} has a value; add ,{PLUG_IN} to it")),
        };
    }
    let property = format!(
        "  <!-- viola-agent setup -->\n  <property>\n    <name>{PROPERTY}</name>\n    <value>{PLUG_IN}</value>\n  </property>\n"
    );
    let end = "</configuration>";
    let range = root.range();
    let (before, element, after) = (
        &text[..range.start],
        &text[range.clone()],
        &text[range.end..],
    );
    Site::New(match element.strip_suffix(end) {
        Some(content) => format!("{before}{content}{property}{end}{after}"),
        None => {
            let begin = element.trim_end_matches("/>").trim_end();
            format!("{before}{begin}>\n{property}{end}{after}")
        }
    })
}

/// The unit that mounts the blocks.
pub fn mount_unit() -> String {
    format!(
        "# viola-agent setup\n[Unit]\nDescription=Blocks of HDFS DataNodes on this host\n\n\
         [Mount]\nWhat=viola\nWhere={MOUNT}\nType=virtiofs\nOptions=ro\n\n[Install]\nWantedBy=multi-user.target\n"
    )
}

/// Where the blocks are mounted, or fstab mounts them.
pub fn mounted_at(root: &Path) -> Option<PathBuf> {
    ["proc/self/mounts", "etc/fstab"].iter().find_map(|file| {
        let text = fs::read_to_string(root.join(file)).unwrap_or_default();
        text.lines().find_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                ["viola", path, "virtiofs", ..] => Some(PathBuf::from(path)),
                _ => None,
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    const SITE_TEXT: &str = "<?xml version=\"1.0\"?>\n<!-- mine -->\n<configuration>\n  <property><name>dfs.replication</name>\
        <value>1</value></property>\n</configuration>\n";

    #[test]
    fn the_property_is_added_and_the_rest_stays() {
        let path = Path::new("/etc/hadoop/hdfs-site.xml");
        let Site::New(text) = with_property(path, SITE_TEXT) else {
            panic!();
        };
        let (before, after) = SITE_TEXT.split_once("</configuration>").unwrap();
        assert!(text.starts_with(before) && text.ends_with(&format!("</configuration>{after}")));
        assert!(
            text.contains(&format!("<value>{PLUG_IN}</value>")),
            "{text}"
        );
        assert_eq!(with_property(path, &text), Site::IsThere);
        for empty in ["<configuration/>", "<configuration>\n</configuration>"] {
            let Site::New(text) = with_property(path, empty) else {
                panic!("{empty}");
            };
            assert_eq!(with_property(path, &text), Site::IsThere, "{text}");
        }
    }

    #[test]
    fn what_setup_cannot_change_is_left_to_the_operator() {
        let path = Path::new("/conf/hdfs-site.xml");
        let other = format!(
            "<configuration><property><name>{PROPERTY}</name><value>a.B</value></property></configuration>"
        );
        for (text, what) in [
            (other.as_str(), "has a value; add ,org.viola"),
            ("<configuration>", "/conf/hdfs-site.xml: "),
            ("<x/>", "no configuration of Hadoop"),
        ] {
            let Site::ByHand(said) = with_property(path, text) else {
                panic!("{text}");
            };
            assert!(said.contains(what), "{said}");
        }
        // A comment is no property.
        let commented = format!("<configuration><!-- <name>{PROPERTY}</name> --></configuration>");
        assert!(matches!(with_property(path, &commented), Site::New(_)));
    }

    /// A file with its folders.
    fn file(root: &Path, path: &str, text: &str) -> PathBuf {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn clients_are_found_where_packages_archives_and_programs_have_them() {
        let dir = tempfile::tempdir().unwrap();
        let root = &dir.path().canonicalize().unwrap();
        let unpacked = file(root, "opt/hadoop-3.5.0/etc/hadoop/hdfs-site.xml", "");
        file(root, "opt/hadoop-3.5.0/share/hadoop/common/lib/a.jar", "");
        let of_program = file(root, "srv/conf/hdfs-site.xml", "");
        let packaged = file(root, "etc/hadoop/conf.empty/hdfs-site.xml", "");
        symlink("conf.empty", root.join("etc/hadoop/conf")).unwrap();
        let environment = format!("A=b\0HADOOP_CONF_DIR={}\0", root.join("srv/conf").display());
        let libraries = Some(root.join("opt/hadoop-3.5.0/share/hadoop/common/lib"));
        let of = |site: PathBuf| Client {
            site,
            libraries: libraries.clone(),
        };
        let found = clients(root, &[(environment, String::new())]);
        assert_eq!(found, [of(packaged), of(unpacked), of(of_program)]);
        // Of two, one cannot tell which Hadoop reads the configuration of a package.
        file(root, "usr/local/hadoop/share/hadoop/common/lib/a.jar", "");
        assert_eq!(clients(root, &[])[0].libraries, None);
    }

    #[test]
    fn a_vm_that_gets_blocks_has_a_port_or_a_device() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        assert_eq!(source(root), None);
        file(root, "sys/bus/virtio/devices/virtio0/device", "0x0001\n");
        assert_eq!(source(root), None);
        file(root, "sys/bus/virtio/devices/virtio1/device", "0x001a\n");
        assert_eq!(source(root), Some(Source::VirtioFs));
        // The tag of another file system.
        file(root, "sys/fs/virtiofs/1/tag", "home\n");
        assert_eq!(source(root), None);
        file(root, "sys/fs/virtiofs/2/tag", "viola\n");
        assert_eq!(source(root), Some(Source::VirtioFs));
        file(root, "dev/virtio-ports/org.viola.read.0", "");
        assert_eq!(source(root), Some(Source::Stream));
    }

    #[test]
    fn a_mount_is_one_of_the_tag() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        file(
            root,
            "etc/fstab",
            "viola /srv ext4 ro 0 0\nhome /home virtiofs rw 0 0\n",
        );
        assert_eq!(mounted_at(root), None);
        file(root, "etc/fstab", "viola /blocks virtiofs ro,nofail 0 0\n");
        assert_eq!(mounted_at(root), Some("/blocks".into()));
    }
}
