// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.io.IOException;

/** A block that cannot be had here, with the reason. Never reaches the HDFS client. */
final class Refused extends IOException {
  private static final long serialVersionUID = 1L;

  final Reason reason;

  Refused(Reason reason, String detail) {
    super(detail == null ? reason.sentence : reason.sentence + " (" + detail + ")");
    this.reason = reason;
  }

  Refused(Reason reason, Throwable cause) {
    this(reason, String.valueOf(cause));
    initCause(cause);
  }
}
