// SPDX-License-Identifier: Apache-2.0
//! Class paths and flags of Hadoop and of what runs on it: HBase, Spark.

use super::Hadoop;
use crate::error::{Error, Result};

/// The software on the class path of a Java program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JavaStack {
    /// Hadoop and the benchmark client.
    Hadoop,
    /// HBase, its PerformanceEvaluation and Hadoop.
    HBase,
    /// Spark SQL and Hadoop.
    Spark,
}

/// Packages of the JDK that HBase and Spark access by reflection, as their start scripts say.
const OPENED: [&str; 13] = [
    "java.base/java.lang",
    "java.base/java.lang.invoke",
    "java.base/java.lang.reflect",
    "java.base/java.io",
    "java.base/java.net",
    "java.base/java.nio",
    "java.base/java.util",
    "java.base/java.util.concurrent",
    "java.base/java.util.concurrent.atomic",
    "java.base/jdk.internal.ref",
    "java.base/jdk.internal.misc",
    "java.base/sun.nio.ch",
    "java.base/sun.util.calendar",
];

impl JavaStack {
    /// Its folder below `build/hadoop`.
    fn folder(self) -> Option<&'static str> {
        match self {
            Self::Hadoop => None,
            Self::HBase => Some("hbase"),
            Self::Spark => Some("spark"),
        }
    }

    /// Java options beside those of all programs.
    pub(super) fn flags(self) -> Vec<String> {
        match self {
            Self::Hadoop => Vec::new(),
            Self::HBase | Self::Spark => {
                let open = |part: &str| format!("--add-opens={part}=ALL-UNNAMED");
                OPENED.into_iter().map(open).collect()
            }
        }
    }

    /// If both have a library, Spark's version is newer than Hadoop's, and HBase's is older.
    pub(super) fn class_path(self, hadoop: &Hadoop, conf: &str) -> String {
        let own = |name: &str| format!("{}/{name}/*", hadoop.folder().display());
        match self {
            Self::Hadoop => hadoop.class_path(conf),
            Self::HBase => format!("{}:{}", hadoop.class_path(conf), own("hbase")),
            Self::Spark => {
                let [conf, plug_in, tests, jars] = hadoop.class_parts(conf);
                format!("{conf}:{plug_in}:{tests}:{}:{jars}", own("spark"))
            }
        }
    }
}

impl Hadoop {
    /// Checks that this stack was fetched.
    ///
    /// # Errors
    /// [`Error::NoJavaStack`] if it was not.
    pub fn require(&self, stack: JavaStack) -> Result<()> {
        match stack.folder() {
            Some(name) if !self.folder().join(name).join("LIST").is_file() => {
                Err(Error::NoJavaStack)
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hadoop(folder: &std::path::Path) -> Hadoop {
        std::fs::create_dir_all(folder.join("build/hadoop/jars")).unwrap();
        for jar in ["viola-hdfs.jar", "viola-hdfs-tests.jar"] {
            std::fs::write(folder.join("build/hadoop").join(jar), "").unwrap();
        }
        let java = folder.join("jdk/bin");
        std::fs::create_dir_all(&java).unwrap();
        std::fs::write(java.join("java"), "").unwrap();
        std::os::unix::fs::symlink(folder.join("jdk"), folder.join("build/hadoop/java")).unwrap();
        Hadoop::find_from([folder]).unwrap()
    }

    #[test]
    fn the_plug_in_comes_first_on_the_class_path() {
        let folder = tempfile::tempdir().unwrap();
        let hadoop = hadoop(folder.path());
        for stack in [JavaStack::Hadoop, JavaStack::HBase, JavaStack::Spark] {
            let path = stack.class_path(&hadoop, "/conf");
            let parts: Vec<&str> = path.split(':').collect();
            assert_eq!(parts[0], "/conf");
            assert!(parts[1].ends_with("viola-hdfs.jar"), "{path}");
            assert_eq!(parts.iter().filter(|p| p.ends_with("jars/*")).count(), 1);
        }
        assert!(
            JavaStack::Spark
                .class_path(&hadoop, "/conf")
                .ends_with("/jars/*")
        );
    }

    #[test]
    fn a_missing_stack_names_the_script_that_fetches_it() {
        let folder = tempfile::tempdir().unwrap();
        let hadoop = hadoop(folder.path());
        hadoop.require(JavaStack::Hadoop).unwrap();
        let error = hadoop.require(JavaStack::Spark).unwrap_err().to_string();
        assert!(error.contains("--bench"), "{error}");
    }
}
