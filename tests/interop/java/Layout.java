// Decodes contents of ZooKeeper paths with the classes of Kafka 3.9.  A line is a path, the version
// and the contents in base64 ("=" before them); the answer is the decoded value, as Scala prints it.

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.Base64;
import org.apache.zookeeper.data.Stat;

public class Layout {
    public static void main(String[] arguments) throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = lines.readLine()) != null; ) {
            String[] words = line.split(" ");
            byte[] data = Base64.getDecoder().decode(words[2].substring(1));
            System.out.println(decoded(words[0], Integer.parseInt(words[1]), data));
        }
    }

    static Object decoded(String path, int version, byte[] data) {
        String[] parts = path.substring(1).split("/");
        if (path.endsWith("/state")) {
            Stat stat = new Stat();
            stat.setVersion(version);
            return kafka.zk.TopicPartitionStateZNode.decode(data, stat);
        }
        if (path.startsWith("/brokers/topics/")) {
            return kafka.zk.TopicZNode.decode(parts[2], data);
        }
        if (path.startsWith("/brokers/ids/")) {
            kafka.zk.BrokerInfo info =
                    kafka.zk.BrokerIdZNode.decode(Integer.parseInt(parts[2]), data);
            return info + " " + info.broker().rack();
        }
        if (path.startsWith("/config/")) {
            return kafka.zk.ConfigEntityZNode.decode(data);
        }
        switch (path) {
            case "/controller":
                return kafka.zk.ControllerZNode.decode(data);
            case "/controller_epoch":
                return kafka.zk.ControllerEpochZNode.decode(data);
            case "/cluster/id":
                return kafka.zk.ClusterIdZNode.fromJson(data);
            case "/admin/reassign_partitions":
                return kafka.zk.ReassignPartitionsZNode.decode(data);
            case "/admin/preferred_replica_election":
                return kafka.zk.PreferredReplicaElectionZNode.decode(data);
            case "/latest_producer_id_block":
                return kafka.zk.ProducerIdBlockZNode.parseProducerIdBlockData(data);
            default:
                throw new IllegalArgumentException(path);
        }
    }
}
