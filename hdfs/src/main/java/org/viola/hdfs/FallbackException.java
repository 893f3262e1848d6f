// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.io.IOException;

/** The block must be read from its DataNode, for this reason. The HDFS client never sees this exception. */
final class FallbackException extends IOException {
  private static final long serialVersionUID = 1L;

  final FallbackReason reason;

  FallbackException(FallbackReason reason, String detail) {
    super(detail == null ? reason.sentence : reason.sentence + " (" + detail + ")");
    this.reason = reason;
  }

  FallbackException(FallbackReason reason, Throwable cause) {
    this(reason, String.valueOf(cause));
    initCause(cause);
  }
}
